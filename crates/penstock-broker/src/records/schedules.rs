//! Schedules in records.

use bytes::Bytes;
use penstock_message::{
    AppRelease, AppVersion, CatchUp, Due, HIGHEST_PRIORITY, Message, MessageId, Overlap, Rhythm,
    ScheduleName, SchedulePlan, ScheduleTally, ScheduleTiming, Skipped,
};

use super::{
    RecordError, RecordReader, RecordWriter, ScheduleHead, ScheduleProgress, fired, planned,
    scheduled,
};
use crate::table::interner::Interner;

impl RecordWriter {
    pub(super) fn schedule_name(&mut self, schedule: &ScheduleName) {
        self.text(&schedule.app);
        self.text(&schedule.name);
    }

    pub(super) fn schedule_head(&mut self, names: &Interner, head: &ScheduleHead) {
        let mut flags = 0;
        for (flag, is_set) in [
            (scheduled::DECLARED, head.declared.is_some()),
            (scheduled::SET, head.set.is_some()),
            (scheduled::PAUSED, head.is_paused),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        self.difference(head.anchor, self.time);
        if let Some((plan, generation)) = &head.declared {
            self.plan(names, plan);
            match &generation.version {
                AppVersion::Unnamed => self.tag(0),
                AppVersion::Number(number) => {
                    self.tag(1);
                    self.varint(*number);
                }
                AppVersion::Text(text) => {
                    self.tag(2);
                    self.text(text);
                }
            }
            self.difference(generation.started_at, self.time);
        }
        if let Some(plan) = &head.set {
            self.plan(names, plan);
        }
    }

    fn plan(&mut self, names: &Interner, plan: &SchedulePlan) {
        let ScheduleTiming {
            rhythm,
            zone,
            jitter_ms,
        } = &plan.timing;
        match rhythm {
            Rhythm::Cron(line) => {
                self.tag(0);
                self.text(line);
            }
            Rhythm::Every(ms) => {
                self.tag(1);
                self.varint(*ms);
            }
            Rhythm::At(at) => {
                self.tag(2);
                self.varint(*at);
            }
        }
        self.text(zone);
        self.varint(*jitter_ms);
        self.tag(plan.overlap as u8);
        self.tag(plan.catch_up as u8);
        self.varint(plan.window_ms);
        self.text(&plan.queue);
        let message = &plan.message;
        let mut flags = 0;
        for (flag, is_set) in [
            (planned::EXPIRY, message.expires_at.is_some()),
            (planned::RESULT, message.result_ttl_ms.is_some()),
            (planned::EXTRAS, message.extras.is_some()),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        self.text(&message.task);
        self.tag(message.priority);
        self.tag(message.max_deliveries);
        match message.expires_at {
            None => {}
            // A plan with any other kind of due time is refused.
            Some(Due::AfterMs(ms) | Due::At(ms)) => self.varint(ms),
        }
        if let Some(ttl_ms) = message.result_ttl_ms {
            self.varint(ttl_ms);
        }
        if message.extras.is_some() {
            self.rare(names, [0, 0], message.extras.as_deref(), None);
        }
        self.slice(&message.body);
    }

    pub(super) fn schedule_progress(&mut self, progress: Option<&ScheduleProgress>) {
        let Some(progress) = progress else {
            return self.tag(fired::REMOVED);
        };
        let has_tally = progress.tally != ScheduleTally::default();
        let mut flags = 0;
        for (flag, is_set) in [
            (fired::LAST, progress.last.is_some()),
            (fired::QUEUED, progress.queued.is_some()),
            (fired::SKIPPED, progress.skipped.is_some()),
            (fired::TALLY, has_tally),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        self.difference(progress.after, self.time);
        if let Some((time, job)) = progress.last {
            self.difference(time, self.time);
            self.bytes.extend_from_slice(&job.0);
        }
        if let Some(time) = progress.queued {
            self.difference(time, self.time);
        }
        if let Some((time, why)) = progress.skipped {
            self.difference(time, self.time);
            self.tag(why as u8);
        }
        if has_tally {
            let ScheduleTally {
                fired,
                skipped,
                missed,
            } = progress.tally;
            for count in [fired, skipped, missed] {
                self.varint(count);
            }
        }
    }
}

impl RecordReader<'_> {
    pub(super) fn schedule_name(&mut self) -> Result<ScheduleName, RecordError> {
        Ok(ScheduleName {
            app: self.text()?.to_owned(),
            name: self.text()?.to_owned(),
        })
    }

    pub(super) fn schedule_head(
        &mut self,
        names: &mut Interner,
    ) -> Result<ScheduleHead, RecordError> {
        let flags = self.flags("schedule", scheduled::KNOWN)?;
        let has = |flag| flags & flag != 0;
        let anchor = self.difference(self.time)?;
        let declared = match has(scheduled::DECLARED) {
            true => {
                let plan = self.plan(names)?;
                let at = self.at;
                let version = match self.byte()? {
                    0 => AppVersion::Unnamed,
                    1 => AppVersion::Number(self.varint()?),
                    2 => AppVersion::Text(self.text()?.to_owned()),
                    _ => {
                        let what = "version of an app";
                        return Err(RecordError::UnknownField { what, at });
                    }
                };
                let started_at = self.difference(self.time)?;
                let generation = AppRelease {
                    version,
                    started_at,
                };
                Some((plan, generation))
            }
            false => None,
        };
        Ok(ScheduleHead {
            declared,
            set: match has(scheduled::SET) {
                true => Some(self.plan(names)?),
                false => None,
            },
            is_paused: has(scheduled::PAUSED),
            anchor,
        })
    }

    fn plan(&mut self, names: &mut Interner) -> Result<SchedulePlan, RecordError> {
        let at = self.at;
        let rhythm = match self.byte()? {
            0 => Rhythm::Cron(self.text()?.to_owned()),
            1 => Rhythm::Every(self.varint()?),
            2 => Rhythm::At(self.varint()?),
            _ => {
                let what = "rhythm of a schedule";
                return Err(RecordError::UnknownField { what, at });
            }
        };
        let timing = ScheduleTiming {
            rhythm,
            zone: self.text()?.to_owned(),
            jitter_ms: self.varint()?,
        };
        let overlap = self.one_of("overlap of a schedule", &Overlap::ALL)?;
        let catch_up = self.one_of("catch-up of a schedule", &CatchUp::ALL)?;
        let window_ms = self.varint()?;
        let queue = self.text()?.to_owned();
        let flags = self.flags("message of a schedule", planned::KNOWN)?;
        let has = |flag| flags & flag != 0;
        let task = self.text()?.to_owned();
        let at = self.at;
        let priority = self.byte()?;
        if priority > HIGHEST_PRIORITY {
            let what = "priority";
            return Err(RecordError::Malformed { what, at });
        }
        let message = Message {
            id: MessageId::default(),
            task,
            priority,
            max_deliveries: self.byte()?,
            expires_at: match has(planned::EXPIRY) {
                true => Some(Due::AfterMs(self.varint()?)),
                false => None,
            },
            result_ttl_ms: match has(planned::RESULT) {
                true => Some(self.varint()?),
                false => None,
            },
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            extras: match has(planned::EXTRAS) {
                true => self.rare(names, [&mut 0, &mut 0])?.0.map(Box::new),
                false => None,
            },
            body: Bytes::copy_from_slice(self.slice()?),
        };
        Ok(SchedulePlan {
            timing,
            overlap,
            catch_up,
            window_ms,
            queue,
            message,
        })
    }

    pub(super) fn schedule_progress(&mut self) -> Result<Option<ScheduleProgress>, RecordError> {
        let flags = self.flags("progress of a schedule", fired::KNOWN | fired::REMOVED)?;
        let has = |flag| flags & flag != 0;
        if has(fired::REMOVED) {
            return Ok(None);
        }
        let after = self.difference(self.time)?;
        let last = match has(fired::LAST) {
            true => Some((self.difference(self.time)?, MessageId(self.array()?))),
            false => None,
        };
        let queued = match has(fired::QUEUED) {
            true => Some(self.difference(self.time)?),
            false => None,
        };
        let skipped = match has(fired::SKIPPED) {
            true => {
                let time = self.difference(self.time)?;
                Some((time, self.one_of("reason of a skip", &Skipped::ALL)?))
            }
            false => None,
        };
        let tally = match has(fired::TALLY) {
            true => ScheduleTally {
                fired: self.varint()?,
                skipped: self.varint()?,
                missed: self.varint()?,
            },
            false => ScheduleTally::default(),
        };
        Ok(Some(ScheduleProgress {
            after,
            last,
            queued,
            skipped,
            tally,
        }))
    }

    fn flags(&mut self, what: &'static str, known: u8) -> Result<u8, RecordError> {
        let at = self.at;
        match self.byte()? {
            flags if flags & !known == 0 => Ok(flags),
            _ => Err(RecordError::UnknownField { what, at }),
        }
    }

    fn one_of<T: Copy>(&mut self, what: &'static str, all: &[T]) -> Result<T, RecordError> {
        let at = self.at;
        let found = all.get(usize::from(self.byte()?)).copied();
        found.ok_or(RecordError::UnknownField { what, at })
    }
}
