//! Defines the bytes between a supervisor and its children. Both always come from one build, so there are no
//! versions here.
//!
//! ```text
//!     packet    sequence u32, place u16, jobs u16, payload u32, in_file u8, task u16 + bytes, payload
//!     payload   a job each: id 16, attempt u32, crashes u8, redelivered u8, wants_result u8, extras u8
//!               (1: it was retried, 2: retries up to a number, 4: after delays, 8: headers, 16: limits, 32: inputs,
//!               64: a workflow, 128: the id names its place in a join),
//!               enqueued_at u64, each of the extras that there are: generation u32, attempts_before u32;
//!               retries u32; delays u8, each u64; headers u16, each two u16 + bytes; timeout u64 and soft timeout u64, in
//!               ms, 0 for none; shape u8, inputs u32 + bytes; workflow 16 and its deadline u64, 0 for none;
//!               notes u16, each u32 + bytes; body u32 + bytes
//!     frame     length u32 (of what follows), then nothing: the bell; slots u32: how many of its slots can take jobs from
//!               now on; or news of a wait:
//!               sequence u32, place u16, index u16, wait u32, what u32; or an outcome:
//!               sequence u32, place u16, index u16, kind u8, has_value u8, cost_ns u64, cpu_ns u64, delay_ms u64,
//!               value u32 + bytes, if it failed: fingerprint u64, class u8 + text, message u8 + text,
//!               preview u16 + bytes; note (the rest); or, with the kind 255, the progress of a running job:
//!               sequence u32, place u16, index u16, kind u8, 8 unused, body (the rest)
//! ```
//!
//! All numbers are little-endian. A packet is one message on the shared socket. If its payload is too large for
//! that, it is in a file whose descriptor comes with the message.

use bytes::Bytes;
use penstock_message::{
    Delivery, Extras, Failure, InputShape, MessageId, Op, Progress, Retries, Tx, place_of_heir,
};
use penstock_wire::convert;

/// Size up to which payloads go through the socket itself, whose buffer holds about 200 KB.
pub const INLINE_PAYLOAD_BYTES: usize = 48 * 1024;
/// Maximum size of a message on the shared socket: header, longest task name, payload.
pub const MAX_PACKET_BYTES: usize = INLINE_PAYLOAD_BYTES + 23 + u16::MAX as usize;
/// Maximum size of an outcome. Results are limited long before.
const MAX_FRAME_BYTES: usize = 64 << 20;

/// Header of a packet, before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketHeader<'a> {
    pub sequence: u32,
    pub place: u16,
    pub jobs: u16,
    pub payload_bytes: u32,
    /// Whether the payload is in the file that comes with the packet.
    pub in_file: bool,
    pub task: &'a str,
}

impl PacketHeader<'_> {
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.place.to_le_bytes());
        out.extend_from_slice(&self.jobs.to_le_bytes());
        out.extend_from_slice(&self.payload_bytes.to_le_bytes());
        out.push(self.in_file.into());
        out.extend_from_slice(&(self.task.len() as u16).to_le_bytes());
        out.extend_from_slice(self.task.as_bytes());
    }
}

/// Returns the number of bytes that a job takes in a payload.
pub fn job_bytes(delivery: &Delivery) -> usize {
    let message = &delivery.message;
    let notes: usize = message.notes.iter().map(|note| 4 + note.len()).sum();
    let extras = message.extras.as_deref();
    let extras = extras.map_or(0, |extras| {
        extras_bytes(message.id, extras, &delivery.inputs)
    });
    16 + 4 + 1 + 1 + 1 + 1 + 8 + extras + 2 + notes + 4 + message.body.len()
}

const WAS_RETRIED: u8 = 1;
const AT_MOST: u8 = 2;
const AFTER: u8 = 4;
const HEADERS: u8 = 8;
const LIMITS: u8 = 16;
const INPUTS: u8 = 32;
const WORKFLOW: u8 = 64;
const MEMBER: u8 = 128;

/// Returns the flags of the job's extras that a child needs.
fn extras_flags(id: MessageId, extras: &Extras, inputs: &[u8]) -> u8 {
    let retried = extras.generation > 0 || extras.attempts_before > 0;
    let retries = match &extras.retries {
        None => 0,
        Some(Retries::AtMost(_)) => AT_MOST,
        Some(Retries::After(_)) => AFTER,
    };
    let retried = if retried { WAS_RETRIED } else { 0 };
    let headers = if extras.headers.is_empty() {
        0
    } else {
        HEADERS
    };
    let has_limits = extras.timeout_ms.is_some() || extras.soft_timeout_ms.is_some();
    let limits = if has_limits { LIMITS } else { 0 };
    let inputs = match extras.inputs {
        Some(_) if !inputs.is_empty() => INPUTS,
        _ => 0,
    };
    let workflow = if extras.workflow.is_some() {
        WORKFLOW
    } else {
        0
    };
    let is_member = extras.member.is_some() && extras.member == place_of_heir(id);
    let member = if is_member { MEMBER } else { 0 };
    retried | retries | headers | limits | inputs | workflow | member
}

fn extras_bytes(id: MessageId, extras: &Extras, inputs: &[u8]) -> usize {
    let flags = extras_flags(id, extras, inputs);
    let retries = match &extras.retries {
        None => 0,
        Some(Retries::AtMost(_)) => 4,
        Some(Retries::After(delays)) => 1 + 8 * delays.len(),
    };
    let headers = match flags & HEADERS {
        0 => 0,
        _ => 2 + 4 * extras.headers.len() + extras.headers_bytes(),
    };
    let limits = usize::from(flags & LIMITS != 0) * 16;
    let inputs = usize::from(flags & INPUTS != 0) * (1 + 4 + inputs.len());
    let workflow = usize::from(flags & WORKFLOW != 0) * 24;
    8 * usize::from(flags & WAS_RETRIED) + retries + headers + limits + inputs + workflow
}

fn encode_extras(extras: &Extras, delivery: &Delivery, out: &mut Vec<u8>) {
    let inputs = &delivery.inputs;
    let flags = extras_flags(delivery.message.id, extras, inputs);
    if flags & WAS_RETRIED != 0 {
        out.extend_from_slice(&extras.generation.to_le_bytes());
        out.extend_from_slice(&extras.attempts_before.to_le_bytes());
    }
    match &extras.retries {
        None => {}
        Some(Retries::AtMost(retries)) => out.extend_from_slice(&retries.to_le_bytes()),
        Some(Retries::After(delays)) => {
            out.push(delays.len() as u8);
            for delay in delays {
                out.extend_from_slice(&delay.to_le_bytes());
            }
        }
    }
    if flags & HEADERS != 0 {
        out.extend_from_slice(&(extras.headers.len() as u16).to_le_bytes());
        for (name, value) in &extras.headers {
            for bytes in [name.as_bytes(), value] {
                out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
                out.extend_from_slice(bytes);
            }
        }
    }
    if flags & LIMITS != 0 {
        for limit in [extras.timeout_ms, extras.soft_timeout_ms] {
            out.extend_from_slice(&limit.unwrap_or(0).to_le_bytes());
        }
    }
    if flags & INPUTS != 0 {
        out.push(extras.inputs.map_or(0, |inputs| inputs.shape as u8));
        out.extend_from_slice(&(inputs.len() as u32).to_le_bytes());
        out.extend_from_slice(inputs);
    }
    if flags & WORKFLOW != 0 {
        out.extend_from_slice(&extras.workflow.unwrap_or_default().0);
        out.extend_from_slice(&delivery.deadline.unwrap_or(0).to_le_bytes());
    }
}

/// Appends a job to a payload.
pub fn encode_job(delivery: &Delivery, out: &mut Vec<u8>) {
    let message = &delivery.message;
    out.extend_from_slice(&message.id.0);
    out.extend_from_slice(&message.attempt.to_le_bytes());
    out.push(message.crashes);
    out.push(delivery.redelivered.into());
    out.push(message.result_ttl_ms.is_some().into());
    let extras = message.extras.as_deref();
    out.push(extras.map_or(0, |extras| {
        extras_flags(message.id, extras, &delivery.inputs)
    }));
    out.extend_from_slice(&message.enqueued_at.to_le_bytes());
    if let Some(extras) = extras {
        encode_extras(extras, delivery, out);
    }
    out.extend_from_slice(&(message.notes.len() as u16).to_le_bytes());
    for note in &message.notes {
        out.extend_from_slice(&(note.len() as u32).to_le_bytes());
        out.extend_from_slice(note);
    }
    out.extend_from_slice(&(message.body.len() as u32).to_le_bytes());
    out.extend_from_slice(&message.body);
}

/// Job as a child sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView<'a> {
    pub id: [u8; 16],
    pub attempt: u32,
    pub crashes: u8,
    pub redelivered: bool,
    pub wants_result: bool,
    pub enqueued_at_ms: u64,
    /// Earlier failures; `None` if it has never failed for good.
    pub retried: Option<Retried>,
    /// Retries, if the call overrides its task.
    pub retries: Option<Retries>,
    pub headers: Vec<(&'a str, &'a [u8])>,
    pub timeout_ms: Option<u64>,
    pub soft_timeout_ms: Option<u64>,
    /// Input values of the job, from the join, as `InputValues` reads them, and their shape.
    pub inputs: Option<(InputShape, &'a [u8])>,
    pub workflow: Option<[u8; 16]>,
    /// Whether its id names its place in a join.
    pub is_member: bool,
    /// Time at which the workflow is cancelled.
    pub deadline_ms: Option<u64>,
    pub notes: Vec<&'a [u8]>,
    pub body: &'a [u8],
}

/// Part of a job that was retried after it had failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    /// Number of such retries.
    pub generation: u32,
    /// Attempts before that; retries are counted from there.
    pub attempts_before: u32,
}

/// Kind of a job's outcome, as a child reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Succeeded = 0,
    Retry = 1,
    Failed = 2,
    /// Did not run to its end; does not count as an attempt.
    GivenBack = 3,
    /// Has arguments of another version of the task: tried again later; does not count as an attempt.
    Deferred = 4,
    /// Lost its slot while its process lives on. The note says how, in UTF-8.
    Lost = 5,
    /// Was cancelled while it ran. The note has the reason, if any, in UTF-8.
    Cancelled = 6,
    /// Returned steps that replace it. The note has them, see [`encode_steps`].
    Replaced = 7,
    /// Succeeded, and enqueues further jobs, which the note has.
    Spawned = 8,
}

impl Kind {
    pub fn from_number(number: u8) -> Option<Self> {
        const ALL: [Kind; 9] = [
            Kind::Succeeded,
            Kind::Retry,
            Kind::Failed,
            Kind::GivenBack,
            Kind::Deferred,
            Kind::Lost,
            Kind::Cancelled,
            Kind::Replaced,
            Kind::Spawned,
        ];
        ALL.get(usize::from(number)).copied()
    }
}

/// Encodes the operations that come with the end of a job.
pub fn encode_steps(steps: Vec<Op>) -> Vec<u8> {
    convert::encode_tx(Tx { ops: steps }).into()
}

/// Reads the result of [`encode_steps`].
pub fn decode_steps(bytes: &Bytes) -> Result<Vec<Op>, Malformed> {
    let tx = convert::decode_tx(bytes.clone()).map_err(|_| Malformed)?;
    Ok(tx.ops)
}

/// Outcome of a job, as a child reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutcomeFrame<'a> {
    pub sequence: u32,
    pub place: u16,
    pub index: u16,
    pub kind: Kind,
    pub cost_ns: u64,
    /// CPU time that its thread used for it; 0 if not measured.
    pub cpu_ns: u64,
    /// Delay before the next attempt of a retry, or until a deferred job is due.
    pub delay_ms: u64,
    pub value: Option<&'a [u8]>,
    /// Present only for a job that failed for good.
    pub failure: Option<FailureView<'a>>,
    pub note: &'a [u8],
}

/// Reason why a job failed for good. Each text has at most [`Failure::TEXT_CAP_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureView<'a> {
    pub class: &'a str,
    pub message: &'a str,
    pub fingerprint: u64,
    /// Preview of the arguments for people, in UTF-8; at most [`Failure::PREVIEW_CAP_BYTES`].
    pub preview: &'a [u8],
}

impl FailureView<'_> {
    fn encoded_len(&self) -> usize {
        8 + 1 + self.class.len() + 1 + self.message.len() + 2 + self.preview.len()
    }

    fn encode_into(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.fingerprint.to_le_bytes());
        for text in [self.class, self.message] {
            debug_assert!(text.len() <= Failure::TEXT_CAP_BYTES);
            out.push(text.len() as u8);
            out.extend_from_slice(text.as_bytes());
        }
        debug_assert!(self.preview.len() <= Failure::PREVIEW_CAP_BYTES);
        out.extend_from_slice(&(self.preview.len() as u16).to_le_bytes());
        out.extend_from_slice(self.preview);
    }
}

impl From<FailureView<'_>> for Failure {
    fn from(view: FailureView<'_>) -> Self {
        Self {
            class: view.class.to_owned(),
            message: view.message.to_owned(),
            fingerprint: view.fingerprint,
            preview: Bytes::copy_from_slice(view.preview),
        }
    }
}

/// Bell: outcomes are in the ring.
pub const BELL: [u8; 4] = [0; 4];

/// Frame that a child sends over its own socket or its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    Bell,
    /// Number of its slots that can take jobs.
    Serving(u32),
    Wait(WaitFrame),
    Progress(ProgressFrame<'a>),
    Outcome(OutcomeFrame<'a>),
}

/// State change of a running job's wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFrame {
    pub sequence: u32,
    pub place: u16,
    pub index: u16,
    /// Number of the wait, counted by its slot; never 0.
    pub wait: u32,
    pub what: Wait,
}

/// Progress of a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgressFrame<'a> {
    pub sequence: u32,
    pub place: u16,
    pub index: u16,
    /// Encoded progress, at most [`Progress::CAP_BYTES`].
    pub body: &'a [u8],
}

impl ProgressFrame<'_> {
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        debug_assert!(self.body.len() <= Progress::CAP_BYTES);
        let len = PROGRESS_BYTES + self.body.len();
        out.extend_from_slice(&(len as u32).to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.place.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.push(PROGRESS_KIND);
        // No shorter frame has this length.
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(self.body);
    }
}

/// State of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Wait {
    /// The wait takes long: the job's slot may be lent.
    Begun = 0,
    /// The wait is over, and the job waits for its turn.
    Over = 1,
    /// Like `Over`, and a signal must announce the turn.
    OverOnLoop = 2,
    /// The wait was abandoned, and the job continues at once.
    BrokenOff = 3,
}

const SERVING_BYTES: usize = 4;
const WAIT_BYTES: usize = 16;
/// Bytes of a progress frame before its body.
const PROGRESS_BYTES: usize = 17;
/// Value in the place of an outcome's kind.
const PROGRESS_KIND: u8 = 255;

impl WaitFrame {
    pub fn encode(&self) -> [u8; 4 + WAIT_BYTES] {
        let mut frame = [0; 4 + WAIT_BYTES];
        frame[..4].copy_from_slice(&(WAIT_BYTES as u32).to_le_bytes());
        frame[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        frame[8..10].copy_from_slice(&self.place.to_le_bytes());
        frame[10..12].copy_from_slice(&self.index.to_le_bytes());
        frame[12..16].copy_from_slice(&self.wait.to_le_bytes());
        frame[16..].copy_from_slice(&(self.what as u32).to_le_bytes());
        frame
    }
}

/// Encodes the frame that reports how many slots of a child can take jobs.
pub fn serving(slots: u32) -> [u8; 4 + SERVING_BYTES] {
    let mut frame = [0; 4 + SERVING_BYTES];
    frame[..4].copy_from_slice(&(SERVING_BYTES as u32).to_le_bytes());
    frame[4..].copy_from_slice(&slots.to_le_bytes());
    frame
}

impl OutcomeFrame<'_> {
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let value = self.value.unwrap_or_default();
        debug_assert_eq!(self.failure.is_some(), self.kind == Kind::Failed);
        let failure = self.failure.map_or(0, |failure| failure.encoded_len());
        let len = 38 + value.len() + failure + self.note.len();
        out.extend_from_slice(&(len as u32).to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.place.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.push(self.kind as u8);
        out.push(self.value.is_some().into());
        out.extend_from_slice(&self.cost_ns.to_le_bytes());
        out.extend_from_slice(&self.cpu_ns.to_le_bytes());
        out.extend_from_slice(&self.delay_ms.to_le_bytes());
        out.extend_from_slice(&(value.len() as u32).to_le_bytes());
        out.extend_from_slice(value);
        if let Some(failure) = &self.failure {
            failure.encode_into(out);
        }
        out.extend_from_slice(self.note);
    }
}

/// Error for malformed bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// Takes numbers and slices off the front of a buffer.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    fn sized(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        self.bytes(len)
    }

    fn short(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u16()?;
        self.bytes(len.into())
    }

    /// Text that a failed job is listed by.
    fn listed(&mut self) -> Result<&'a str, Malformed> {
        let len = usize::from(self.u8()?);
        if len > Failure::TEXT_CAP_BYTES {
            return Err(Malformed);
        }
        std::str::from_utf8(self.bytes(len)?).map_err(|_| Malformed)
    }

    fn failure(&mut self) -> Result<FailureView<'a>, Malformed> {
        let fingerprint = self.u64()?;
        Ok(FailureView {
            class: self.listed()?,
            message: self.listed()?,
            fingerprint,
            preview: {
                let len = usize::from(self.u16()?);
                if len > Failure::PREVIEW_CAP_BYTES {
                    return Err(Malformed);
                }
                self.bytes(len)?
            },
        })
    }

    fn wait(&mut self) -> Result<WaitFrame, Malformed> {
        Ok(WaitFrame {
            sequence: self.u32()?,
            place: self.u16()?,
            index: self.u16()?,
            wait: self.u32()?,
            what: match self.u32()? {
                0 => Wait::Begun,
                1 => Wait::Over,
                2 => Wait::OverOnLoop,
                3 => Wait::BrokenOff,
                _ => return Err(Malformed),
            },
        })
    }

    /// Reads the header of a packet. The remaining bytes are the payload, unless that is in a file.
    pub fn packet_header(&mut self) -> Result<PacketHeader<'a>, Malformed> {
        Ok(PacketHeader {
            sequence: self.u32()?,
            place: self.u16()?,
            jobs: self.u16()?,
            payload_bytes: self.u32()?,
            in_file: self.u8()? != 0,
            task: {
                let len = self.u16()?;
                std::str::from_utf8(self.bytes(len.into())?).map_err(|_| Malformed)?
            },
        })
    }

    fn shape(&mut self) -> Result<InputShape, Malformed> {
        let number = usize::from(self.u8()?);
        InputShape::ALL.get(number).copied().ok_or(Malformed)
    }

    fn limit(&mut self, extras: u8) -> Result<Option<u64>, Malformed> {
        let ms = match extras & LIMITS {
            0 => 0,
            _ => self.u64()?,
        };
        Ok((ms > 0).then_some(ms))
    }

    pub fn job(&mut self) -> Result<JobView<'a>, Malformed> {
        let id = self.array()?;
        let attempt = self.u32()?;
        let crashes = self.u8()?;
        let redelivered = self.u8()? != 0;
        let wants_result = self.u8()? != 0;
        let extras = self.u8()?;
        let has_workflow = extras & WORKFLOW != 0;
        Ok(JobView {
            id,
            attempt,
            crashes,
            redelivered,
            wants_result,
            enqueued_at_ms: self.u64()?,
            retried: match extras & WAS_RETRIED {
                0 => None,
                _ => Some(Retried {
                    generation: self.u32()?,
                    attempts_before: self.u32()?,
                }),
            },
            retries: match extras & (AT_MOST | AFTER) {
                0 => None,
                AT_MOST => Some(Retries::AtMost(self.u32()?)),
                AFTER => {
                    let count = self.u8()?;
                    let delays = (0..count).map(|_| self.u64()).collect::<Result<_, _>>()?;
                    Some(Retries::After(delays))
                }
                _ => return Err(Malformed),
            },
            headers: match extras & HEADERS {
                0 => Vec::new(),
                _ => {
                    let count = self.u16()?;
                    (0..count)
                        .map(|_| {
                            let name = self.short()?;
                            let name = std::str::from_utf8(name).map_err(|_| Malformed)?;
                            Ok((name, self.short()?))
                        })
                        .collect::<Result<_, _>>()?
                }
            },
            timeout_ms: self.limit(extras)?,
            soft_timeout_ms: self.limit(extras)?,
            inputs: match extras & INPUTS {
                0 => None,
                _ => Some((self.shape()?, self.sized()?)),
            },
            workflow: match has_workflow {
                true => Some(self.array()?),
                false => None,
            },
            is_member: extras & MEMBER != 0,
            deadline_ms: match has_workflow {
                true => Some(self.u64()?).filter(|ms| *ms > 0),
                false => None,
            },
            notes: {
                let count = self.u16()?;
                (0..count).map(|_| self.sized()).collect::<Result<_, _>>()?
            },
            body: self.sized()?,
        })
    }

    /// Returns the next whole frame, if it is there.
    pub fn frame(&mut self) -> Result<Option<Frame<'a>>, Malformed> {
        let Some((len, rest)) = self.0.split_first_chunk() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*len) as usize;
        if len > MAX_FRAME_BYTES {
            return Err(Malformed);
        }
        let Some((frame, rest)) = rest.split_at_checked(len) else {
            return Ok(None);
        };
        self.0 = rest;
        let mut fields = Reader(frame);
        match frame.len() {
            0 => return Ok(Some(Frame::Bell)),
            SERVING_BYTES => return Ok(Some(Frame::Serving(fields.u32()?))),
            WAIT_BYTES => return Ok(Some(Frame::Wait(fields.wait()?))),
            _ => {}
        }
        let sequence = fields.u32()?;
        let place = fields.u16()?;
        let index = fields.u16()?;
        let kind = fields.u8()?;
        if kind == PROGRESS_KIND {
            fields.bytes(8)?;
            let body = fields.0;
            if body.len() > Progress::CAP_BYTES {
                return Err(Malformed);
            }
            return Ok(Some(Frame::Progress(ProgressFrame {
                sequence,
                place,
                index,
                body,
            })));
        }
        let kind = Kind::from_number(kind).ok_or(Malformed)?;
        let has_value = fields.u8()? != 0;
        let cost_ns = fields.u64()?;
        let cpu_ns = fields.u64()?;
        let delay_ms = fields.u64()?;
        let value = fields.sized()?;
        let failure = match kind {
            Kind::Failed => Some(fields.failure()?),
            _ => None,
        };
        Ok(Some(Frame::Outcome(OutcomeFrame {
            sequence,
            place,
            index,
            kind,
            cost_ns,
            cpu_ns,
            delay_ms,
            value: has_value.then_some(value),
            failure,
            note: fields.0,
        })))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use penstock_message::{Inputs, Lease, Message};

    use super::*;

    fn retried(extras: Extras) -> Delivery {
        let mut delivery = delivery(&[], b"again", false);
        delivery.message.extras = extras.boxed();
        delivery
    }

    fn delivery(notes: &[&'static [u8]], body: &'static [u8], wanted: bool) -> Delivery {
        let message = Message {
            id: MessageId([7; 16]),
            task: "shop.send".into(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: wanted.then_some(1000),
            max_deliveries: 3,
            attempt: 2,
            crashes: 1,
            enqueued_at: 1_700_000_000_000,
            notes: notes.iter().map(|note| Bytes::from_static(note)).collect(),
            body: Bytes::from_static(body),
            extras: None,
        };
        Delivery {
            consumer: 0,
            lease: Lease {
                message: message.id,
                epoch: 1,
                grant: 1,
            },
            queue: "default".into(),
            redelivered: wanted,
            message,
            inputs: Bytes::new(),
            deadline: None,
        }
    }

    #[test]
    fn jobs_arrive_as_they_were_sent_and_as_long_as_foretold() {
        let jobs = [
            delivery(&[], b"", false),
            delivery(&[b"first", b""], b"\x92\x90\x80", true),
            Delivery {
                inputs: Bytes::from_static(b"values of a join"),
                deadline: Some(1_700_000_060_000),
                ..retried(Extras {
                    inputs: Some(Inputs {
                        join: MessageId([9; 16]),
                        shape: InputShape::List,
                    }),
                    workflow: Some(MessageId([8; 16])),
                    member: place_of_heir(MessageId([7; 16])),
                    timeout_ms: Some(5),
                    ..Extras::default()
                })
            },
            retried(Extras {
                generation: 2,
                attempts_before: 7,
                ..Extras::default()
            }),
            retried(Extras {
                retries: Some(Retries::After(vec![0, 1_000, u64::MAX])),
                headers: vec![
                    ("tenant".into(), Bytes::from_static(b"north")),
                    ("".into(), Bytes::new()),
                ],
                ..Extras::default()
            }),
            retried(Extras {
                generation: 1,
                retries: Some(Retries::AtMost(u32::MAX)),
                ..Extras::default()
            }),
            // None of this is for the child.
            retried(Extras {
                key: Some(Bytes::from_static(b"tenant")),
                ..Extras::default()
            }),
        ];
        let mut payload = Vec::new();
        for job in &jobs {
            let before = payload.len();
            encode_job(job, &mut payload);
            assert_eq!(payload.len() - before, job_bytes(job));
        }
        let mut reader = Reader(&payload);
        for job in &jobs {
            let view = reader.job().unwrap();
            assert_eq!(view.redelivered, job.redelivered);
            assert_eq!(view.deadline_ms, job.deadline);
            let (inputs, job) = (&job.inputs, &job.message);
            assert_eq!(view.id, job.id.0);
            assert_eq!((view.attempt, view.crashes), (job.attempt, job.crashes));
            assert_eq!(view.wants_result, job.result_ttl_ms.is_some());
            assert_eq!(view.enqueued_at_ms, job.enqueued_at);
            assert_eq!(view.body, job.body);
            assert_eq!(view.notes, job.notes);
            let extras = job.extras.as_deref().cloned().unwrap_or_default();
            let retried = view.retried.unwrap_or(Retried {
                generation: 0,
                attempts_before: 0,
            });
            assert_eq!(retried.generation, extras.generation);
            assert_eq!(retried.attempts_before, extras.attempts_before);
            assert_eq!(view.retries, extras.retries);
            let headers = view
                .headers
                .iter()
                .map(|(name, value)| ((*name).to_owned(), Bytes::copy_from_slice(value)));
            assert_eq!(headers.collect::<Vec<_>>(), extras.headers);
            let given = extras.inputs.map(|extras| (extras.shape, &inputs[..]));
            assert_eq!(view.inputs, given);
            assert_eq!(view.workflow.map(MessageId), extras.workflow);
            assert_eq!(view.is_member, extras.member.is_some());
            assert_eq!(view.timeout_ms, extras.timeout_ms);
        }
        assert_eq!(reader.job(), Err(Malformed));
    }

    #[test]
    fn a_packet_header_reads_back_and_no_prefix_of_it_does() {
        let header = PacketHeader {
            sequence: 9,
            place: 3,
            jobs: 256,
            payload_bytes: 1 << 24,
            in_file: true,
            task: "größe.messen",
        };
        let mut bytes = Vec::new();
        header.encode_into(&mut bytes);
        assert_eq!(Reader(&bytes).packet_header(), Ok(header));
        for len in 0..bytes.len() {
            assert_eq!(Reader(&bytes[..len]).packet_header(), Err(Malformed));
        }
    }

    #[test]
    fn frames_read_back_whole_or_not_yet() {
        let outcome = OutcomeFrame {
            sequence: 5,
            place: 2,
            index: 255,
            kind: Kind::Retry,
            cost_ns: 1_234,
            cpu_ns: 567,
            delay_ms: 60_000,
            value: None,
            failure: None,
            note: b"note",
        };
        let with_empty_value = OutcomeFrame {
            value: Some(b""),
            note: b"",
            ..outcome
        };
        let failed = OutcomeFrame {
            kind: Kind::Failed,
            failure: Some(FailureView {
                class: "shop.Gone",
                message: "größer",
                fingerprint: u64::MAX - 1,
                preview: b"to='ada'",
            }),
            ..outcome
        };
        let mut bytes = Vec::new();
        outcome.encode_into(&mut bytes);
        let first = bytes.len();
        bytes.extend_from_slice(&BELL);
        bytes.extend_from_slice(&serving(19));
        with_empty_value.encode_into(&mut bytes);
        failed.encode_into(&mut bytes);

        let mut reader = Reader(&bytes);
        assert_eq!(reader.frame(), Ok(Some(Frame::Outcome(outcome))));
        assert_eq!(reader.frame(), Ok(Some(Frame::Bell)));
        assert_eq!(reader.frame(), Ok(Some(Frame::Serving(19))));
        assert_eq!(reader.frame(), Ok(Some(Frame::Outcome(with_empty_value))));
        assert_eq!(reader.frame(), Ok(Some(Frame::Outcome(failed))));
        assert_eq!(reader.frame(), Ok(None));
        for len in 0..first {
            assert_eq!(Reader(&bytes[..len]).frame(), Ok(None));
        }
    }

    #[test]
    fn news_of_a_wait_reads_back() {
        for what in [Wait::Begun, Wait::Over, Wait::OverOnLoop, Wait::BrokenOff] {
            let wait = WaitFrame {
                sequence: 7,
                place: 3,
                index: 255,
                wait: u32::MAX,
                what,
            };
            let bytes = wait.encode();
            let mut reader = Reader(&bytes);
            assert_eq!(reader.frame(), Ok(Some(Frame::Wait(wait))));
        }
        let mut unknown = [0; 20];
        (unknown[0], unknown[16]) = (16, 4);
        assert_eq!(Reader(&unknown).frame(), Err(Malformed));
    }

    #[test]
    fn nonsense_from_a_child_is_refused() {
        let refused = |bytes: &[u8]| assert_eq!(Reader(bytes).frame(), Err(Malformed));
        refused(&[0xff; 40]);
        refused(&[1, 0, 0, 0, 9]);
        let mut unknown_kind = Vec::new();
        OutcomeFrame {
            sequence: 0,
            place: 0,
            index: 0,
            kind: Kind::Succeeded,
            cost_ns: 0,
            cpu_ns: 0,
            delay_ms: 0,
            value: None,
            failure: None,
            note: b"",
        }
        .encode_into(&mut unknown_kind);
        let mut failed_without_a_reason = unknown_kind.clone();
        unknown_kind[12] = 9;
        refused(&unknown_kind);
        failed_without_a_reason[12] = Kind::Failed as u8;
        refused(&failed_without_a_reason);

        let failed = |class_bytes: u8, class: &[u8]| {
            let mut frame = failed_without_a_reason.clone();
            frame.extend_from_slice(&[0; 8]);
            frame.push(class_bytes);
            frame.extend_from_slice(class);
            frame.push(0);
            frame.extend_from_slice(&[0; 2]);
            let len = (frame.len() - 4) as u32;
            frame[..4].copy_from_slice(&len.to_le_bytes());
            frame
        };
        assert!(Reader(&failed(200, &[b'x'; 200])).frame().is_ok());
        refused(&failed(201, &[b'x'; 201]));
        refused(&failed(2, &[0xff, 0xff]));
        refused(&failed(100, b"short"));

        let with_preview = |bytes: usize| {
            let mut frame = failed(1, b"x");
            frame.truncate(frame.len() - 2);
            frame.extend_from_slice(&(bytes as u16).to_le_bytes());
            frame.extend_from_slice(&vec![b'x'; bytes]);
            let len = (frame.len() - 4) as u32;
            frame[..4].copy_from_slice(&len.to_le_bytes());
            frame
        };
        let most = Failure::PREVIEW_CAP_BYTES;
        assert!(Reader(&with_preview(most)).frame().is_ok());
        refused(&with_preview(most + 1));
    }
}
