//! Calls of a program to other models while it runs a batch (docs/process.md): they come over the socket that the batch
//! came over, and so go what they are answered with. Several may be under way.
//!
//! A program is not believed: what it says of a call is counted before its bytes are read, calls and their bytes are
//! bounded, and none of them outlives its batch.

use std::{
    collections::BTreeMap,
    fmt, io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use proto::{
    Span,
    backend_to_program::{Breach, Call, Called, Carried, ToProgram, line},
};
use repository::{DataType, Model, SLO_MAX};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::{Errno, read, write},
    net::{SendFlags, send},
};

use super::excerpt;
use crate::calls::{Callee, Question, Tensor, UnderWay, Waiting, Waits};

/// Calls of one batch that are under way at once: as many as the largest batch has tasks.
const CALLS_MAX: usize = proto::LatencyProfile::MAX_BATCH;
/// Bytes of their tensors, there and back.
const BYTES_MAX: usize = 256 << 20;

/// What a program's calls need.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    model: String,
    waits: Waits,
    /// Whom to ask; why nobody can be asked otherwise.
    callee: Result<Arc<dyn Callee>, String>,
}

impl Caller {
    /// Of a model, which calls others in one of these ways.
    pub(super) fn new(model: &Model, waits: &Waits, callee: Result<Arc<dyn Callee>, String>) -> Self {
        Self { model: model.name.clone(), waits: waits.clone(), callee }
    }

    /// The same, while nobody can be asked for this reason.
    pub(super) fn without(&self, reason: &str) -> Self {
        Self { callee: Err(reason.to_owned()), ..self.clone() }
    }
}

/// The calls of one batch.
pub(super) struct Calls<'a> {
    caller: &'a Caller,
    /// By their names.
    under_way: BTreeMap<u64, Asked>,
    /// Bytes of questions under way, and of answers that the program has not taken.
    bytes: usize,
    /// What was called, until its bytes are there.
    announced: Option<Call>,
    /// What the program has not taken yet, and how much of its front it has.
    unsent: Vec<u8>,
    sent: usize,
    /// Once there has been a call.
    answers: Option<Answers>,
}

/// A call under way; it ends when this is dropped.
struct Asked {
    bytes: usize,
    /// The outputs that are wanted; all if there are none.
    wanted: Vec<String>,
    _question: UnderWay,
    _waiting: Waiting,
}

/// A call's name, and what came of it.
type Answer = (u64, Result<Vec<Tensor>, String>);

/// Where calls are answered, by whichever thread does.
struct Answers {
    sender: Sender<Answer>,
    receiver: Receiver<Answer>,
    /// Counts them.
    bell: Arc<OwnedFd>,
}

impl Answers {
    fn new() -> io::Result<Self> {
        let (sender, receiver) = crossbeam_channel::bounded(CALLS_MAX);
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self { sender, receiver, bell })
    }
}

impl<'a> Calls<'a> {
    pub(super) fn of(caller: &'a Caller) -> Self {
        let (under_way, unsent) = (BTreeMap::new(), Vec::new());
        Self { caller, under_way, bytes: 0, announced: None, unsent, sent: 0, answers: None }
    }

    /// Whether nothing is to be waited for but what the program says.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.unsent.is_empty()
    }

    /// The program has begun a call.
    ///
    /// # Errors
    /// If its tensors have more bytes than all calls may, or it calls on and on and takes no answers.
    pub(super) fn handle_call(&mut self, call: Call) -> Result<(), Breach> {
        self.check_unsent()?;
        match call.bytes() {
            Some(0..=BYTES_MAX) => {
                self.announced = Some(call);
                Ok(())
            }
            found => {
                let found = found.map_or_else(|| "more than can be counted".to_owned(), |bytes| bytes.to_string());
                Err(Breach(format!("it called a model with {found} bytes, expected at most {BYTES_MAX}")))
            }
        }
    }

    /// It is to be told this besides, in a line.
    ///
    /// # Errors
    /// If it asks on and on and takes no answers.
    pub(super) fn tell(&mut self, told: &[u8]) -> Result<(), Breach> {
        self.check_unsent()?;
        self.unsent.extend_from_slice(told);
        Ok(())
    }

    fn check_unsent(&self) -> Result<(), Breach> {
        if self.unsent.len() - self.sent > 2 * BYTES_MAX {
            return Err(Breach("it asks and does not read what it is answered".to_owned()));
        }
        Ok(())
    }

    /// Bytes that follow before the program says anything else, if there are any.
    pub(super) fn awaits(&self) -> Option<usize> {
        self.announced.as_ref().and_then(Call::bytes)
    }

    /// They have come.
    pub(super) fn handle_bytes(&mut self, mut bytes: Vec<u8>) -> io::Result<()> {
        let Some(call) = self.announced.take() else { return Ok(()) };
        let id = call.id;
        let count = bytes.len();
        let mut carried = Vec::with_capacity(call.inputs.len());
        for input in &call.inputs {
            let rest = bytes.split_off(input.bytes);
            carried.push(std::mem::replace(&mut bytes, rest));
        }
        match self.ask(call, (carried, count))? {
            Ok(asked) => {
                self.bytes += count;
                self.under_way.insert(id, asked);
            }
            Err(reason) => self.fail(id, &reason),
        }
        Ok(())
    }

    fn ask(&mut self, call: Call, (data, bytes): (Vec<Vec<u8>>, usize)) -> io::Result<Result<Asked, String>> {
        let Caller { model, waits, callee } = self.caller;
        let Call { id, model: callee_name, version, outputs: wanted, timeout_us, inputs } = call;
        let checked = || {
            let callee = callee.as_ref().map_err(Clone::clone)?;
            if self.under_way.contains_key(&id) {
                return Err(format!("call {id} is under way already, expected another number"));
            }
            if self.under_way.len() >= CALLS_MAX {
                return Err(format!("found {CALLS_MAX} calls under way, expected fewer"));
            }
            if self.bytes + bytes > BYTES_MAX {
                let found = self.bytes + bytes;
                return Err(format!("calls under way have {found} bytes, expected at most {BYTES_MAX}"));
            }
            let inputs = inputs.into_iter().zip(data).map(|(Carried { name, datatype, shape, .. }, data)| {
                let unknown = || format!("input {name}: found type {datatype}, expected one of the protocol's");
                let datatype = DataType::from_name(&datatype).ok_or_else(unknown)?;
                Ok(Tensor { name, datatype, shape, data: data.into() })
            });
            let inputs = inputs.collect::<Result<_, String>>()?;
            let objective = timeout_us.and_then(|micros| i64::try_from(micros).ok()).filter(|&micros| micros > 0);
            let objective = objective.map(|micros| Span(micros.saturating_mul(1_000)).min(SLO_MAX));
            let waiting = waits.begin(model, &callee_name)?;
            Ok((callee, waiting, Question { model: callee_name, version, inputs, objective }))
        };
        let (callee, waiting, question) = match checked() {
            Ok(checked) => checked,
            Err(reason) => return Ok(Err(reason)),
        };
        if self.answers.is_none() {
            self.answers = Some(Answers::new()?);
        }
        let answers = self.answers.as_ref().expect("it has just been made");
        let (sender, bell) = (answers.sender.clone(), Arc::clone(&answers.bell));
        let answered = Box::new(move |answer| {
            // There is room for all that may be under way; whoever has left does not take it.
            if sender.try_send((id, answer)).is_ok() {
                let _ = write(&*bell, &1u64.to_ne_bytes());
            }
        });
        Ok(Ok(Asked { bytes, wanted, _question: callee.ask(question, answered), _waiting: waiting }))
    }

    /// Waits until the program says something, or takes something, or a call is answered.
    ///
    /// # Errors
    /// If that cannot be waited for, or the program takes nothing any more.
    pub(super) fn wait(&mut self, stream: &UnixStream) -> io::Result<bool> {
        let wanted = if self.unsent.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mut events = vec![PollFd::new(stream, wanted)];
        events.extend(self.answers.as_ref().map(|answers| PollFd::new(&answers.bell, PollFlags::IN)));
        match poll(&mut events, None) {
            Err(Errno::INTR) => return Ok(false),
            polled => polled?,
        };
        let found = events[0].revents();
        drop(events);
        self.take_answers();
        self.send(stream)?;
        Ok(found.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR))
    }

    fn take_answers(&mut self) {
        let Some(answers) = &self.answers else { return };
        let _ = read(&*answers.bell, &mut [0u8; 8]);
        loop {
            let (id, answer) = match self.answers.as_ref().map(|answers| answers.receiver.try_recv()) {
                Some(Ok(answer)) => answer,
                Some(Err(TryRecvError::Empty | TryRecvError::Disconnected)) | None => return,
            };
            let Some(asked) = self.under_way.remove(&id) else { continue };
            self.bytes -= asked.bytes;
            match answer.and_then(|outputs| chosen(outputs, &asked.wanted)) {
                Ok(outputs) => self.answer(id, &outputs),
                Err(reason) => self.fail(id, &reason),
            }
        }
    }

    fn answer(&mut self, id: u64, outputs: &[Tensor]) {
        let bytes: usize = outputs.iter().map(|output| output.data.len()).sum();
        if self.bytes + (self.unsent.len() - self.sent) + bytes > BYTES_MAX {
            let reason = format!("calls under way have {bytes} bytes more, expected at most {BYTES_MAX} in all");
            return self.fail(id, &reason);
        }
        let carried = outputs.iter().map(|Tensor { name, datatype, shape, data }| Carried {
            name: name.clone(),
            datatype: datatype.name().to_owned(),
            shape: shape.clone(),
            bytes: data.len(),
        });
        self.reply(&Called { id, outputs: carried.collect(), failed: None }, outputs);
    }

    fn fail(&mut self, id: u64, reason: &str) {
        self.reply(&Called { id, outputs: vec![], failed: Some(excerpt(reason)) }, &[]);
    }

    fn reply(&mut self, called: &Called, outputs: &[Tensor]) {
        self.unsent.drain(..std::mem::take(&mut self.sent));
        self.unsent.extend(line(&ToProgram::Called(called.clone())));
        outputs.iter().for_each(|output| self.unsent.extend_from_slice(&output.data));
    }

    /// Gives the program what it takes now.
    fn send(&mut self, stream: &UnixStream) -> io::Result<()> {
        while self.sent < self.unsent.len() {
            match send(stream, &self.unsent[self.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => self.sent += sent,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        (self.unsent, self.sent) = (Vec::new(), 0);
        Ok(())
    }

    /// The batch is answered, and its calls end: those that are not answered never are. Yields what the program is yet
    /// to be told before anything else is.
    pub(super) fn end(mut self) -> Vec<u8> {
        self.unsent.drain(..self.sent);
        self.unsent
    }
}

/// The outputs that are wanted, all if none is named.
fn chosen(outputs: Vec<Tensor>, wanted: &[String]) -> Result<Vec<Tensor>, String> {
    let is_missing = |name: &&String| outputs.iter().all(|output| output.name != **name);
    if let Some(missing) = wanted.iter().find(is_missing) {
        let names: Vec<&str> = outputs.iter().map(|output| output.name.as_str()).collect();
        return Err(format!("output '{missing}': expected one of: {}", names.join(", ")));
    }
    let is_wanted = |output: &Tensor| wanted.is_empty() || wanted.contains(&output.name);
    Ok(outputs.into_iter().filter(is_wanted).collect())
}

impl fmt::Debug for Calls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} calls of {} under way", self.under_way.len(), self.caller.model)
    }
}
