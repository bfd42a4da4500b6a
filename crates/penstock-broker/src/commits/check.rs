//! Checks whether a transaction may be applied.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Claim, Condition, Conflict, Due, Extras, Failure, Filter, HIGHEST_PRIORITY, Hold, JoinId,
    JoinOutcome, Key, Lease, Member, Message, MessageId, MessageState, Op, Open, Refusal, Retries,
    ScheduleStep, SeededMap, SeededSet, SeededState, Target, Unsealed, Until, place_of_heir,
};

use super::grow::check_added;
use super::{Checked, Checking, ReplacedJob, Unchecked, exact_bytes};
use crate::Broker;
use crate::connections::NAME_CAP_BYTES;
use crate::messages::entry::BodyAt;
use crate::state::BrokerState;

/// Maximum number of queues of one message. Each has its own entry, and the list is compared with itself.
const QUEUES_CAP: usize = 64;
const KEY_CAP_BYTES: usize = 1024;
/// Maximum number of members of a join, which keeps a bit for each.
const JOIN_CAP: u32 = penstock_message::JOIN_CAP;

impl Checking {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            new_ids: SeededSet::with_hasher(hashing),
            new_joins: SeededMap::with_hasher(hashing),
            added: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        assert_eq!(self.new_ids.hasher(), self.new_joins.hasher());
        assert_eq!(self.new_ids.hasher(), self.added.hasher());
        *self.new_ids.hasher()
    }

    fn begin(&mut self) {
        self.new_ids.clear();
        self.new_joins.clear();
        self.leased.clear();
        self.arrivals.clear();
        self.has_unsealed = false;
        self.replaced = None;
        self.added.clear();
    }

    /// Whether the message takes the place of the replaced job.
    fn is_heir(&self, message: &Message) -> bool {
        let replaced = self.replaced.as_ref();
        replaced.is_some_and(|replaced| replaced.job == message.id)
    }

    /// Notes that a message takes the place of the replaced job, or one that was added to a group.
    fn find_in_place(&mut self, message: &Message) -> Result<(), Refusal> {
        match self.is_heir(message) {
            true => self.find_heir(message),
            false => self.find_added(message),
        }
    }

    /// Notes that a message takes the place of the replaced job.
    fn find_heir(&mut self, message: &Message) -> Result<(), Refusal> {
        let member = message.extras.as_ref().and_then(|extras| extras.member);
        match &mut self.replaced {
            Some(it) if [None, it.member, place_of_heir(it.job)].contains(&member) => {
                it.take_place()
            }
            Some(_) => Err(Refusal::Invalid(
                "a message that replaces a job must not report to another join".to_owned(),
            )),
            None => Ok(()),
        }
    }
}

impl Broker {
    /// Checks whether all operations may be applied, judged by the state before the first.
    pub(super) fn check(&mut self, session: u32, ops: Vec<Op>) -> Result<Checked, Unchecked> {
        self.checks += 1;
        let checking = self.checking.take();
        let mut checking = checking.expect("one transaction is checked at a time");
        checking.begin();
        checking.is_alone = ops.len() == 1;
        checking.may_find_no_room = self.has_limits() && !ops.iter().any(Op::is_settlement);
        // In a long backlog, entries of ids are scattered in memory. Several lookups at a time overlap, and most find
        // nothing, so this is usually all.
        let messages = &self.state.messages;
        checking.names_held = checking.is_alone
            || ops.iter().any(|op| match op {
                Op::Publish { message, .. } => messages.holds(&message.id),
                Op::Hold { .. } => true,
                _ => false,
            });
        let fits = self.check_size(&ops).map_err(|op| (op, Refusal::DiskFull));
        let grown = fits.and_then(|()| self.check_growth(&ops, &mut checking));
        let checked = grown.and_then(|grows| {
            ops.iter()
                .enumerate()
                .skip(grows)
                .try_for_each(|(index, op)| {
                    let checked = self.check_op(session, op, &mut checking);
                    checked.map_err(|why| (index as u32, why))
                })
        });
        let checked = checked.and_then(|()| match &checking.replaced {
            Some(replaced) => check_replaced(replaced, &checking).map_err(|why| (0, why)),
            None => Ok(()),
        });
        let checked = checked.and_then(|()| check_added(&checking).map_err(|why| (0, why)));
        let mut leased = std::mem::take(&mut self.spare_leased);
        leased.clear();
        leased.append(&mut checking.leased);
        self.checking = Some(checking);
        match checked {
            Ok(()) => Ok(Checked { ops, leased }),
            Err((op, why)) => {
                let mut ops = ops;
                ops.truncate(op as usize);
                let half = Checked { ops, leased };
                Err(Unchecked { op, why, half })
            }
        }
    }

    fn check_op(&mut self, session: u32, op: &Op, checking: &mut Checking) -> Result<(), Refusal> {
        match op {
            Op::Ack { lease, .. } | Op::Release { lease, .. } => {
                self.check_lease(session, lease, checking)
            }
            Op::Replace { lease, .. } => {
                self.check_lease(session, lease, checking)?;
                let slot = checking.leased[checking.leased.len() - 1];
                let messages = &self.state.messages;
                if messages.copies(&lease.message).nth(1).is_some() {
                    let why = "a job that was published to several queues can't be replaced";
                    return Err(Refusal::Invalid(why.to_owned()));
                }
                let replaced = ReplacedJob {
                    job: lease.message,
                    member: messages.member(slot),
                    has_heir: false,
                };
                match checking.replaced.replace(replaced) {
                    None => Ok(()),
                    Some(_) => Err(Refusal::Invalid(
                        "a transaction can replace only one job".to_owned(),
                    )),
                }
            }
            Op::Fail {
                lease,
                value,
                note,
                failure,
                ..
            } => {
                self.check_body("an error", value.as_ref().map_or(0, Bytes::len))?;
                self.check_body("a note", note.len())?;
                check_text("an error's class", &failure.class)?;
                check_text("an error's message", &failure.message)?;
                check_at_most(
                    "a preview of arguments",
                    failure.preview.len(),
                    Failure::PREVIEW_CAP_BYTES,
                )?;
                self.check_lease(session, lease, checking)
            }
            Op::Move {
                lease,
                queue,
                patch,
                ..
            } => {
                if let Some(queue) = queue {
                    check_name("a queue's name", queue)?;
                }
                if let Some(note) = &patch.note {
                    self.check_body("a note", note.len())?;
                }
                self.check_lease(session, lease, checking)
            }
            Op::Publish {
                queues,
                message,
                due,
                unless_key,
            } => {
                if queues.is_empty() {
                    return Err(Refusal::Invalid(
                        "a message must be published to at least one queue".to_owned(),
                    ));
                }
                if queues.len() > QUEUES_CAP {
                    return Err(Refusal::Invalid(format!(
                        "a message is published to {} queues; the limit is {QUEUES_CAP}",
                        queues.len()
                    )));
                }
                for (index, queue) in queues.iter().enumerate() {
                    check_name("a queue's name", queue)?;
                    if queues[..index].contains(queue) {
                        return Err(Refusal::Invalid(format!("queue {queue:?} is named twice")));
                    }
                }
                self.check_shape(message)?;
                check_inputs(message, None)?;
                if checking.is_heir(message) || checking.is_added(message) {
                    if queues.len() > 1 || unless_key.is_some() {
                        let why = "a message that replaces a job or joins a group must have one queue and no key";
                        return Err(Refusal::Invalid(why.to_owned()));
                    }
                    check_is_new_here(message, checking)?;
                    return checking.find_in_place(message);
                }
                if let Some(member) = message.extras.as_ref().and_then(|extras| extras.member) {
                    if queues.len() > 1 {
                        let why = "a member of a join can be published to only one queue";
                        return Err(Refusal::Invalid(why.to_owned()));
                    }
                    self.check_member(member, checking)?;
                }
                // An id appears once in a transaction, even if its message will be skipped: an earlier operation may
                // remove the key, and then the message is applied after all.
                if !planted!("check-id-late") {
                    check_is_new_here(message, checking)?;
                }
                let mut replaces = false;
                if let Some(claim) = unless_key {
                    check_claim(claim, queues, message, *due)?;
                    if self.key_exists(&claim.key) {
                        let owner = self.state.owner_of(&claim.key);
                        match (claim.conflict, owner) {
                            (Conflict::Refuse, Some(owner)) => {
                                return Err(Refusal::Claimed(owner));
                            }
                            _ => match self.to_replace(claim, message) {
                                Some(slot) => replaces = self.is_in_queue(slot, &queues[0]),
                                // It will be skipped, so it may already exist. (`apply` checks again.)
                                None => return Ok(()),
                            },
                        }
                    }
                }
                if planted!("check-id-late") {
                    check_is_new_here(message, checking)?;
                }
                self.check_is_not_held(message, checking)?;
                match checking.may_find_no_room {
                    // The replaced message makes room.
                    true if replaces => self.check_admission(),
                    true => {
                        self.check_admission()?;
                        let bytes = message.body.len() as u64;
                        self.check_room(queues, bytes, due.is_some(), &mut checking.arrivals)
                    }
                    false => Ok(()),
                }
            }
            Op::Put {
                key, value, group, ..
            } => {
                check_own_key(key)?;
                check_name("a group's name", group)?;
                self.check_body("a value", value.body.len())
            }
            Op::Delete { key } => check_own_key(key),
            Op::Guard { key, condition } => {
                check_own_key(key)?;
                let holds = match condition {
                    Condition::Absent => !self.key_exists(key),
                    Condition::Present => self.key_exists(key),
                    Condition::Is(body) => self
                        .state
                        .keys
                        .value(key)
                        .is_some_and(|stored| stored.body() == body),
                };
                if holds || planted!("pass-every-guard") {
                    Ok(())
                } else {
                    Err(Refusal::GuardFailed)
                }
            }
            Op::Hold(Hold {
                join,
                count,
                messages,
                expects,
                then,
                unsealed,
                ..
            }) => {
                if unsealed.is_some() {
                    self.check_unsealed(*count, unsealed.as_ref(), checking)?;
                } else if *count > JOIN_CAP {
                    return Err(Refusal::Invalid(format!(
                        "a join has at most {JOIN_CAP} members, not {count}"
                    )));
                }
                if self.state.joins.find(join).is_some() || !checking.new_ids.insert(*join) {
                    return Err(Refusal::AlreadyExists);
                }
                check_expects(expects, *count)?;
                for place in then {
                    let is_heirs = |it: &&mut ReplacedJob| place_of_heir(it.job) == Some(*place);
                    if let Some(replaced) = checking.replaced.as_mut().filter(is_heirs) {
                        replaced.take_place()?;
                    } else if !checking.find_added_place(*place)? {
                        self.check_member(*place, checking)?;
                    }
                }
                let highest = if unsealed.is_some() { JOIN_CAP } else { *count };
                checking.new_joins.insert(*join, highest);
                for (queue, message) in messages {
                    check_name("a queue's name", queue)?;
                    self.check_shape(message)?;
                    check_inputs(message, Some(*join))?;
                    if checking.is_heir(message) || checking.is_added(message) {
                        if !checking.new_ids.insert(message.id) {
                            return Err(Refusal::AlreadyExists);
                        }
                        checking.find_in_place(message)?;
                        continue;
                    }
                    if let Some(member) = message.extras.as_ref().and_then(|extras| extras.member) {
                        self.check_member(member, checking)?;
                    }
                    if !checking.new_ids.insert(message.id) {
                        return Err(Refusal::AlreadyExists);
                    }
                    self.check_is_not_held(message, checking)?;
                }
                match checking.may_find_no_room {
                    true => self.check_admission(),
                    false => Ok(()),
                }
            }
            Op::Open(open) => {
                check_at_most(
                    "a workflow's name",
                    open.name.len(),
                    Open::NAME_CAP_BYTES,
                )?;
                check_at_most(
                    "a description of a workflow",
                    open.description.len(),
                    Open::DESCRIPTION_CAP_BYTES,
                )?;
                match checking.may_find_no_room {
                    true => self.check_admission(),
                    false => Ok(()),
                }
            }
            Op::Seal { join, count } => self.check_seal(join, *count),
            Op::Grow { .. } => Err(Refusal::Invalid(
                "operations that add to a group must come before all others".to_owned(),
            )),
            Op::Join { join, index, .. } => match self.state.joins.find(join) {
                Some(slot) if *index >= self.state.joins[slot].count => {
                    let count = self.state.joins[slot].count;
                    Err(Refusal::Invalid(format!(
                        "member {index} does not fit into a join of {count}"
                    )))
                }
                _ => Ok(()),
            },
            Op::Purge { queue }
            | Op::Pause { queue }
            | Op::Resume { queue }
            | Op::Limit { queue, .. } => check_name("a queue's name", queue),
            Op::Cancel {
                target,
                reason,
                running,
            } => {
                check_text("a reason", reason)?;
                match target {
                    Target::Job(id) => self.check_cancel(id, *running),
                    Target::Filter(filter) => check_filter(filter),
                }
            }
            Op::RetryFailed { target, queue } => {
                if let Some(queue) = queue {
                    check_name("a queue's name", queue)?;
                }
                match target {
                    Target::Job(id) => {
                        let slot = self.find_failed(id)?;
                        self.check_retry(slot, queue.is_some())
                    }
                    Target::Filter(filter) => check_filter(filter),
                }
            }
            Op::DropFailed { target } => match target {
                Target::Job(id) => self.find_failed(id).map(|_| ()),
                Target::Filter(filter) => check_filter(filter),
            },
            Op::Schedule { schedule, step } => {
                check_name("a schedule's app", &schedule.app)?;
                check_name("a schedule's name", &schedule.name)?;
                if let ScheduleStep::Declare(plan, _) | ScheduleStep::Set(plan) = step {
                    check_name("a queue's name", &plan.queue)?;
                    self.check_shape(&plan.message)?;
                }
                if let ScheduleStep::Retime(times) = step {
                    check_name("a queue's name", &times.queue)?;
                }
                self.check_schedule(schedule, step)
            }
            Op::Unschedule { schedule } => self.check_known_schedule(schedule),
            Op::Unnamed => Err(Refusal::NotOffered(
                "this broker is older than its client and does not know the operation: upgrade the broker"
                    .to_owned(),
            )),
        }
    }

    fn find_failed(&self, id: &MessageId) -> Result<u32, Refusal> {
        let messages = &self.state.messages;
        let mut found = Err(Refusal::NoSuchJob);
        for slot in messages.copies(id) {
            if messages[slot].is_failed() {
                return Ok(slot);
            }
            found = Err(Refusal::TooLate(self.state_of(slot)));
        }
        found
    }

    /// Checks whether a failed job can return to its queue.
    pub(crate) fn check_retry(&self, slot: u32, has_queue: bool) -> Result<(), Refusal> {
        let BrokerState { messages, keys, .. } = &self.state;
        let is_displaced = messages
            .failure(slot)
            .is_some_and(|failure| failure.is_displaced);
        if is_displaced && !has_queue {
            return Err(Refusal::Invalid(
                "it failed under an older broker, which did not keep its queue: name one"
                    .to_owned(),
            ));
        }
        let member = messages.member(slot);
        let join = member.and_then(|member| self.state.joins.find(&member.join));
        let join = join.map(|join| &self.state.joins[join]);
        if join.is_some_and(|join| join.growth.is_some() && !join.is_unsealed()) {
            // Its group would continue without the members that never arrived.
            return Err(Refusal::Invalid(
                "its group failed, or was cancelled, before all of it was sent: send the group again"
                    .to_owned(),
            ));
        }
        let Some(key) = messages.claim(slot) else {
            return Ok(());
        };
        match keys.owner(key) {
            Some(owner) if owner.slot == slot => Ok(()),
            Some(owner) => {
                let owner = messages[owner.slot].id;
                Err(Refusal::Invalid(format!(
                    "its unique key now belongs to job {owner}"
                )))
            }
            None if keys.find(key).is_some() => Err(Refusal::Invalid(
                "a value is now stored under its unique key".to_owned(),
            )),
            None => Ok(()),
        }
    }

    /// Checks an unsealed join. A workflow has at most one, so that cancelling the workflow finds it at once.
    fn check_unsealed(
        &self,
        count: u32,
        unsealed: Option<&Unsealed>,
        checking: &mut Checking,
    ) -> Result<(), Refusal> {
        if count != 0 {
            let why = format!(
                "an unsealed join gets its count from its seal, so the count must be 0, not {count}"
            );
            return Err(Refusal::Invalid(why));
        }
        let is_second = unsealed
            .and_then(|unsealed| self.state.joins.unsealed_of(&unsealed.workflow))
            .is_some();
        if is_second || std::mem::replace(&mut checking.has_unsealed, true) {
            let why = "another join of the workflow is not sealed";
            return Err(Refusal::Invalid(why.to_owned()));
        }
        Ok(())
    }

    fn check_seal(&self, id: &JoinId, count: u32) -> Result<(), Refusal> {
        let joins = &self.state.joins;
        let Some(slot) = joins.find(id) else {
            return Err(Refusal::Invalid(format!("join {id} is not open")));
        };
        let join = &joins[slot];
        let growth = match &join.growth {
            None => return Err(Refusal::AlreadyExists),
            Some(_) if !join.is_unsealed() => return Err(too_late(join.is_over)),
            Some(growth) => growth,
        };
        let beyond = join
            .arrived()
            .last()
            .is_some_and(|(word, bits)| *word * 64 + (63 - bits.leading_zeros()) >= count);
        match growth.members == count && count > 0 && !beyond {
            true => Ok(()),
            false => {
                let members = growth.members;
                Err(Refusal::Invalid(format!(
                    "a join with {members} members so far can't be sealed with a count of {count}"
                )))
            }
        }
    }

    fn check_member(&self, member: Member, checking: &Checking) -> Result<(), Refusal> {
        let joins = &self.state.joins;
        let count = match checking.new_joins.get(&member.join) {
            Some(count) => *count,
            None => match joins.find(&member.join) {
                Some(slot) => {
                    let join = &joins[slot];
                    if join.is_unsealed() && join.has_arrived(member.index) {
                        // It was added by a transaction that is being resent, and has ended since.
                        return Err(Refusal::AlreadyExists);
                    }
                    if member.index >= join.count && join.growth.is_some() {
                        return Err(too_late(join.is_over));
                    }
                    join.count
                }
                None => {
                    let join = member.join;
                    return Err(Refusal::Invalid(format!("join {join} is not open")));
                }
            },
        };
        match member.index < count {
            true => Ok(()),
            false => {
                let index = member.index;
                Err(Refusal::Invalid(format!(
                    "member {index} does not fit into a join of {count}"
                )))
            }
        }
    }

    fn check_lease(
        &mut self,
        session: u32,
        lease: &Lease,
        checking: &mut Checking,
    ) -> Result<(), Refusal> {
        // A transaction settles a lease only once.
        let messages = &mut self.state.messages;
        let found = messages.check_lease(lease, session, self.checks);
        let slot = found.ok_or(Refusal::LeaseLost)?;
        checking.leased.push(slot);
        Ok(())
    }

    /// Checks the limits of every message, whatever its queue.
    fn check_shape(&self, message: &Message) -> Result<(), Refusal> {
        check_name("a task's name", &message.task)?;
        let notes: usize = message.notes.iter().map(Bytes::len).sum();
        self.check_body("a message", message.body.len() + notes)?;
        if message.priority > HIGHEST_PRIORITY {
            let priority = message.priority;
            return Err(Refusal::Invalid(format!(
                "priorities run from 0 to {HIGHEST_PRIORITY}, not {priority}"
            )));
        }
        if message.max_deliveries == 0 {
            return Err(Refusal::Invalid(
                "max_deliveries must be at least 1".to_owned(),
            ));
        }
        match &message.extras {
            Some(extras) => check_extras(extras),
            None => Ok(()),
        }
    }

    fn check_is_not_held(&self, message: &Message, checking: &Checking) -> Result<(), Refusal> {
        match checking.names_held && self.state.messages.holds(&message.id) {
            true => Err(Refusal::AlreadyExists),
            false => Ok(()),
        }
    }

    fn check_body(&self, what: &str, bytes: usize) -> Result<(), Refusal> {
        let limit = self.options.max_body_bytes.min(BodyAt::CAP_BYTES);
        if bytes <= limit {
            return Ok(());
        }
        let text = format!(
            "{what} of {} is larger than the limit of {}",
            exact_bytes(bytes),
            exact_bytes(limit)
        );
        Err(Refusal::TooLarge(text))
    }

    /// Whether a message owns the key, other than a purged message that has yet to end.
    fn is_owned(&self, key: &Key) -> bool {
        let owner = self.state.keys.owner(key);
        owner.is_some_and(|owner| !self.state.is_purged(owner.slot))
    }

    /// Returns the waiting message that this one replaces because of its claim.
    pub(super) fn to_replace(&self, claim: &Claim, message: &Message) -> Option<u32> {
        let BrokerState { keys, messages, .. } = &self.state;
        if !matches!(claim.conflict, Conflict::Replace { .. }) || keys.find(&claim.key).is_some() {
            return None;
        }
        let owner = keys.owner(&claim.key)?;
        let is_other = messages[owner.slot].id != message.id && !messages.holds(&message.id);
        (is_other && self.state.can_be_replaced(owner.slot)).then_some(owner.slot)
    }

    pub(super) fn is_in_queue(&self, slot: u32, queue: &str) -> bool {
        let BrokerState {
            messages,
            queues,
            names,
            ..
        } = &self.state;
        names.text(queues[messages.queue(slot)].name) == queue
    }

    pub(super) fn key_exists(&self, key: &Key) -> bool {
        self.state.keys.find(key).is_some()
            || self.is_owned(key)
            || matches!(key, Key::Result(id) if self.state.messages.holds(id))
    }
}

/// Returns why no more members may be added to a join that was closed before its seal.
fn too_late(has_failed: bool) -> Refusal {
    Refusal::TooLate(match has_failed {
        true => MessageState::Failed,
        false => MessageState::Cancelling,
    })
}

impl ReplacedJob {
    /// Notes that a message or a join takes the job's place.
    fn take_place(&mut self) -> Result<(), Refusal> {
        match std::mem::replace(&mut self.has_heir, true) {
            false => Ok(()),
            true => Err(Refusal::AlreadyExists),
        }
    }
}

/// Checks that a message replaces the job, and that nothing else is settled: if the job was cancelled, the whole
/// transaction only ends it.
fn check_replaced(replaced: &ReplacedJob, checking: &Checking) -> Result<(), Refusal> {
    let why = match (replaced.has_heir, checking.leased.len()) {
        (true, 1) => return Ok(()),
        (true, _) => "a transaction that replaces a job can't settle another",
        (false, _) => "a transaction that replaces a job must publish its replacement",
    };
    Err(Refusal::Invalid(why.to_owned()))
}

/// Checks that the inputs of a message are the values of the join that holds it.
fn check_inputs(message: &Message, held_by: Option<JoinId>) -> Result<(), Refusal> {
    let inputs = message.extras.as_ref().and_then(|extras| extras.inputs);
    let times = message
        .extras
        .as_ref()
        .and_then(|extras| extras.later.as_ref());
    if times.is_some() && held_by.is_none() {
        return Err(Refusal::Invalid(
            "a message has times that count from its release, but no join holds it".to_owned(),
        ));
    }
    match inputs {
        Some(inputs) if held_by != Some(inputs.join) || !inputs.join.is_join() => {
            let join = inputs.join;
            Err(Refusal::Invalid(format!(
                "a message has the values of join {join} as its inputs, but that join does not hold it"
            )))
        }
        _ => Ok(()),
    }
}

/// Checks that each expected outcome belongs to a different member.
fn check_expects(expects: &[(u32, JoinOutcome)], count: u32) -> Result<(), Refusal> {
    let is_ascending = expects.is_sorted_by(|(one, _), (other, _)| one < other);
    match expects.last() {
        Some((index, _)) if *index >= count => Err(Refusal::Invalid(format!(
            "member {index} does not fit into a join of {count}"
        ))),
        Some(_) if !is_ascending => Err(Refusal::Invalid(
            "the expected outcomes of a join's members are not in order".to_owned(),
        )),
        _ => Ok(()),
    }
}

fn check_name(what: &str, name: &str) -> Result<(), Refusal> {
    match name.len() {
        0 => Err(Refusal::Invalid(format!("{what} is empty"))),
        1..=NAME_CAP_BYTES => Ok(()),
        bytes => Err(Refusal::TooLarge(format!(
            "{what} has {bytes} bytes; the limit is {NAME_CAP_BYTES}"
        ))),
    }
}

/// Checks whether a client may read or write the key. It may only claim a key that a feature derives.
fn check_own_key(key: &Key) -> Result<(), Refusal> {
    match key {
        Key::Scoped(..) => Err(Refusal::Invalid(
            "a unique job's key can be claimed, but not read or written".to_owned(),
        )),
        Key::Result(_) | Key::Named(_) => check_key(key),
    }
}

fn check_claim(
    claim: &Claim,
    queues: &[String],
    message: &Message,
    due: Option<Due>,
) -> Result<(), Refusal> {
    check_key(&claim.key)?;
    let is_plain = (claim.until, claim.conflict) == (Until::Ended, Conflict::Skip);
    if is_plain && !matches!(claim.key, Key::Scoped(..)) {
        return Ok(());
    }
    let extras = message.extras.as_ref();
    let why = match (claim.until, claim.conflict) {
        _ if queues.len() > 1 => "a unique message can be published to only one queue",
        _ if extras.is_some_and(|extras| extras.member.is_some()) => {
            "a unique message can't be a member of a join, which would wait forever if the message were skipped"
        }
        (Until::ForMs(_), Conflict::Replace { .. }) => {
            "a key that is kept for a fixed time can't pass to another message"
        }
        (
            _,
            Conflict::Replace {
                max_wait_ms: Some(_),
            },
        ) if matches!(due, Some(Due::At(_))) => "a longest wait needs a delay, not a time of day",
        (
            Until::Ended,
            Conflict::Replace {
                max_wait_ms: Some(_),
            },
        ) => "a longest wait needs a key that is kept until the start",
        _ => return Ok(()),
    };
    Err(Refusal::Invalid(why.to_owned()))
}

fn check_key(key: &Key) -> Result<(), Refusal> {
    match key {
        Key::Named(name) | Key::Scoped(_, name) if name.is_empty() => {
            Err(Refusal::Invalid("a key is empty".to_owned()))
        }
        Key::Named(name) | Key::Scoped(_, name) if name.len() > KEY_CAP_BYTES => {
            let bytes = name.len();
            Err(Refusal::TooLarge(format!(
                "a key has {bytes} bytes; the limit is {KEY_CAP_BYTES}"
            )))
        }
        _ => Ok(()),
    }
}

/// Checks that the id is new within its transaction. A transaction with one operation brings one id.
fn check_is_new_here(message: &Message, checking: &mut Checking) -> Result<(), Refusal> {
    match checking.is_alone || checking.new_ids.insert(message.id) {
        true => Ok(()),
        false => Err(Refusal::AlreadyExists),
    }
}

fn check_text(what: &str, text: &str) -> Result<(), Refusal> {
    check_at_most(what, text.len(), Failure::TEXT_CAP_BYTES)
}

fn check_at_most(what: &str, bytes: usize, limit: usize) -> Result<(), Refusal> {
    match bytes <= limit {
        true => Ok(()),
        false => Err(Refusal::TooLarge(format!(
            "{what} has {bytes} bytes; the limit is {limit}"
        ))),
    }
}

fn check_filter(filter: &Filter) -> Result<(), Refusal> {
    for (what, name) in [
        ("a queue's name", &filter.queue),
        ("a task's name", &filter.task),
    ] {
        if let Some(name) = name {
            check_name(what, name)?;
        }
    }
    match &filter.class {
        Some(class) => check_text("an error's class", class),
        None => Ok(()),
    }
}

fn check_extras(extras: &Extras) -> Result<(), Refusal> {
    let key_bytes = extras.key.as_ref().map_or(0, Bytes::len);
    check_at_most("a key of a job", key_bytes, Extras::KEY_CAP_BYTES)?;
    check_at_most("headers", extras.headers_bytes(), Extras::HEADERS_CAP_BYTES)?;
    match &extras.retries {
        Some(Retries::After(delays)) if delays.len() > Retries::DELAYS_CAP => {
            let (count, limit) = (delays.len(), Retries::DELAYS_CAP);
            Err(Refusal::Invalid(format!(
                "retries have {count} delays; the limit is {limit}"
            )))
        }
        _ => Ok(()),
    }
}
