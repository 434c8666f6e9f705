//! Answers that are kept for whoever asks the same (`response_cache { enable: true }` of a model), and questions that
//! wait for the answer to an equal one. No IO, no clock.
//!
//! A [`Question`] is a digest of all that decides an answer: which load of the model is asked, and for what. Whoever
//! has one asks by [`Cache::ask`]: it is told the answer, or to wait, or that it is its turn to ask the model. The
//! [`Asking`] of whoever has a turn ends in an answer that all get who wait, or, dropped, in the turn of one of them:
//! an error is nobody else's. Answers of a former load are not looked for: they have other questions, and go when room
//! is needed.
//!
//! Whoever asks the model has an earlier deadline than those who wait for it, so that nobody misses its own by waiting.
//!
//! `quick_cache` keeps what is asked for again (S3-FIFO): a client that asks for ever new things takes the place of
//! what was asked for once, and not of what is asked for often. One that asks for them twice would take all: so once
//! there is no room, the client whose answers take more than a share ([`share`]) gives up its own oldest ones, and
//! nobody else does.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    mem,
    rc::Rc,
};

use aegis::aegis128x4::{Aegis128X4Mac, Key};
use bytes::Bytes;
use frontend::{request::Place, rope::Rope, slots::Client, tasks::Reply};
use proto::Timestamp;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, Weighter, unsync};
use tokio::sync::oneshot;

/// What an entry takes besides the bytes of its answer: its key, its place, and what says how long the parts are.
const ENTRY_BYTES: usize = 256;
/// Answers for which there is room from the start; for more it is made when they come.
const ENTRIES_AT_FIRST: usize = 1024;

/// Bytes of a digest: AEGIS's shorter tag. Of 2^40 questions two have the same one with a chance of 2^-49.
const DIGEST_BYTES: usize = 16;

/// All that decides an answer, as a digest that nobody outside can aim at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Question([u8; DIGEST_BYTES]);

/// Makes questions of one process. The key is secret and new at each start, so that no client can find two requests
/// with one digest. AEGIS-128X4 as a MAC (draft-irtf-cfrg-aegis-aead) takes about as long as reading the bytes, 40 us a
/// megabyte with VAES: a third of HighwayHash, and a thirtieth of digests that need no secret.
#[derive(Clone, Copy)]
pub struct Digester(Key);

/// An answer without what was only its asker's.
#[derive(Debug, Clone)]
pub struct Kept {
    outputs: Rc<[Bytes]>,
    shapes: Rc<[Vec<usize>]>,
    /// As in [`Reply`].
    pub rows: usize,
}

/// What there is to do about a question.
pub enum Turn {
    /// It has been answered.
    Answered(Kept),
    /// Somebody asks already.
    Wait(Waiting),
    /// The model is to be asked.
    Ask(Asking),
}

/// Somebody's turn to ask the model; dropped without an answer, it is the next one's.
pub struct Asking {
    cache: Rc<Cache>,
    question: Question,
    until: Timestamp,
}

/// Waits for the answer to an equal question, or for the turn to ask it; dropping it gives up.
pub struct Waiting {
    cache: Rc<Cache>,
    question: Question,
    place: (Timestamp, u64),
    word: oneshot::Receiver<Word>,
}

/// What somebody who waits is told.
enum Word {
    Answered(Kept),
    YourTurn(Asking),
}

/// All answers that are kept, and all questions that are being asked.
pub struct Cache(RefCell<State>);

struct State {
    kept: unsync::Cache<Question, Entry, Weight, DefaultHashBuilder, Evictions>,
    /// Of clients who have any.
    owned: BTreeMap<Client, Owned>,
    /// Who has more than a share, which only one can.
    over: Option<Client>,
    /// Answers that have ever been kept.
    entries: u64,
    /// Bytes; 0: nothing is kept and nobody waits.
    max: usize,
    asked: HashMap<Question, Asked>,
    waiters: u64,
}

/// An answer in somebody's share.
#[derive(Debug, Clone)]
struct Entry {
    kept: Kept,
    client: Client,
    /// Grows with each.
    number: u64,
}

/// What is kept of one client's questions.
#[derive(Default)]
struct Owned {
    bytes: usize,
    /// The oldest first.
    questions: BTreeMap<u64, Question>,
}

/// Takes down what goes to make room.
#[derive(Debug, Clone, Default)]
struct Evictions;

impl Lifecycle<Question, Entry> for Evictions {
    type RequestState = Vec<Entry>;

    fn on_evict(&self, gone: &mut Vec<Entry>, _: Question, entry: Entry) {
        gone.push(entry);
    }
}

/// A question that is being asked.
#[derive(Default)]
struct Asked {
    /// The deadlines of those who ask, each as often as there are.
    askers: BTreeMap<Timestamp, usize>,
    /// Those who wait, by their deadlines and then in the order in which they came.
    waiting: BTreeMap<(Timestamp, u64), oneshot::Sender<Word>>,
}

#[derive(Clone)]
struct Weight;

impl Weighter<Question, Entry> for Weight {
    fn weight(&self, _: &Question, entry: &Entry) -> u64 {
        entry.kept.bytes() as u64
    }
}

/// Bytes of so many that one client's answers may take while there is no room for others'.
fn share(max: usize) -> usize {
    max / 2
}

impl State {
    /// Keeps an answer that was not kept. If there is no room, whoever has more than a share makes some; if nobody has,
    /// the cache knows what is asked for least.
    fn keep(&mut self, question: Question, client: Client, kept: Kept) {
        self.forget(question);
        let bytes = kept.bytes();
        let has_others = self.owned.keys().any(|owner| *owner != client);
        while has_others && self.kept.weight() as usize + bytes > self.max {
            let own = self.owned.get(&client).map_or(0, |owned| owned.bytes);
            let is_over = own + bytes > share(self.max);
            let Some(owner) = is_over.then_some(client).or(self.over) else { break };
            // An answer that is larger than a share takes nobody else's place.
            let Some(oldest) = self.oldest_of(owner) else { return };
            self.forget(oldest);
        }
        self.entries += 1;
        let owned = self.owned.entry(client).or_default();
        owned.bytes += bytes;
        owned.questions.insert(self.entries, question);
        if owned.bytes > share(self.max) {
            self.over = Some(client);
        }
        let mut gone = Vec::new();
        self.kept.insert_with_lifecycle(question, Entry { kept, client, number: self.entries }, &mut gone);
        gone.iter().for_each(|entry| self.on_gone(entry));
    }

    fn forget(&mut self, question: Question) {
        if let Some((_, entry)) = self.kept.remove(&question) {
            self.on_gone(&entry);
        }
    }

    fn oldest_of(&self, client: Client) -> Option<Question> {
        self.owned.get(&client)?.questions.first_key_value().map(|(_, question)| *question)
    }

    fn on_gone(&mut self, Entry { kept, client, number }: &Entry) {
        let Some(owned) = self.owned.get_mut(client) else { return };
        owned.questions.remove(number);
        owned.bytes -= kept.bytes();
        if self.over == Some(*client) && owned.bytes <= share(self.max) {
            self.over = None;
        }
        if owned.questions.is_empty() {
            self.owned.remove(client);
        }
    }
}

impl Digester {
    /// With this secret.
    #[must_use]
    pub fn new(secret: Key) -> Self {
        Self(secret)
    }

    /// The question of these numbers, these inputs in any order, and these pictures in theirs.
    #[must_use]
    pub fn question(self, numbers: &[u64], inputs: &[(Place, Rope)], pictures: &[Rope]) -> Question {
        let mut mac = Aegis128X4Mac::<DIGEST_BYTES>::new(&self.0);
        let mut head: Vec<u8> = Vec::with_capacity(64);
        head.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let mut number = |number: usize| head.extend_from_slice(&(number as u64).to_le_bytes());
        number(numbers.len());
        let mut sorted: Vec<&(Place, Rope)> = inputs.iter().collect();
        sorted.sort_unstable_by_key(|(place, _)| place.input);
        number(sorted.len());
        // Each length stands before what it is of, so that no two requests are the same bytes.
        for (Place { input, shape, rows: _ }, data) in &sorted {
            number(*input);
            number(shape.len());
            shape.iter().for_each(|dim| number(*dim));
            number(data.len());
        }
        number(pictures.len());
        pictures.iter().for_each(|picture| number(picture.len()));
        mac.update(&head);
        sorted
            .into_iter()
            .map(|(_, data)| data)
            .chain(pictures)
            .flat_map(Rope::pieces)
            .for_each(|piece| mac.update(piece));
        Question(mac.finalize())
    }
}

impl Kept {
    /// Of a reply.
    #[must_use]
    pub fn of(reply: &Reply) -> Self {
        // What lies in a larger buffer would keep all of that.
        let outputs = reply.outputs.iter().map(|output| Bytes::copy_from_slice(output)).collect();
        Self { outputs, shapes: reply.shapes.clone().into(), rows: reply.rows }
    }

    /// The outputs, as in [`Reply`].
    #[must_use]
    pub fn outputs(&self) -> Vec<Bytes> {
        self.outputs.to_vec()
    }

    /// The shapes, as in [`Reply`].
    #[must_use]
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        self.shapes.to_vec()
    }

    /// Bytes that it takes.
    fn bytes(&self) -> usize {
        bytes_of(&self.outputs, &self.shapes)
    }
}

/// Bytes that an answer takes when it is kept.
fn bytes_of(outputs: &[Bytes], shapes: &[Vec<usize>]) -> usize {
    let shapes = shapes.iter().map(|shape| mem::size_of_val(&shape[..]) + mem::size_of::<Vec<usize>>());
    let outputs = outputs.iter().map(|output| output.len() + mem::size_of::<Bytes>());
    ENTRY_BYTES + shapes.sum::<usize>() + outputs.sum::<usize>()
}

impl Cache {
    /// Nothing yet, and of answers so many bytes at most; with 0 it is off.
    #[must_use]
    pub fn new(max: usize) -> Rc<Self> {
        let options =
            OptionsBuilder::new().estimated_items_capacity(ENTRIES_AT_FIRST).weight_capacity(max as u64).build();
        let options = options.expect("both are given");
        let kept = unsync::Cache::with_options(options, Weight, DefaultHashBuilder::default(), Evictions);
        let (owned, asked) = (BTreeMap::new(), HashMap::new());
        Rc::new(Self(RefCell::new(State { kept, owned, over: None, entries: 0, max, asked, waiters: 0 })))
    }

    /// Whether anything can be kept.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.borrow().max > 0
    }

    /// Bytes of all answers that are kept.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.borrow().kept.weight()
    }

    /// Somebody whose deadline is `until` has this question.
    pub fn ask(self: &Rc<Self>, question: Question, until: Timestamp) -> Turn {
        let mut state = self.0.borrow_mut();
        if let Some(Entry { kept, .. }) = state.kept.get(&question) {
            return Turn::Answered(kept.clone());
        }
        let number = state.waiters;
        state.waiters += 1;
        let asked = state.asked.entry(question).or_default();
        if asked.askers.first_key_value().is_some_and(|(asker, _)| *asker <= until) {
            let (sender, word) = oneshot::channel();
            asked.waiting.insert((until, number), sender);
            return Turn::Wait(Waiting { cache: Rc::clone(self), question, place: (until, number), word });
        }
        *asked.askers.entry(until).or_default() += 1;
        Turn::Ask(Asking { cache: Rc::clone(self), question, until })
    }

    /// Somebody asks no longer. If nobody else does whose deadline is as early, it is the turn of one who waits: of
    /// those with the earliest deadline, whoever came first.
    fn handle_asked(self: &Rc<Self>, question: Question, until: Timestamp) {
        let (until, sender) = {
            let mut state = self.0.borrow_mut();
            let Some(asked) = state.asked.get_mut(&question) else { return };
            match asked.askers.get_mut(&until) {
                Some(count @ 2..) => *count -= 1,
                _ => drop(asked.askers.remove(&until)),
            }
            let first = asked.askers.first_key_value().map(|(until, _)| *until);
            let is_next = |until: Timestamp| first.is_none_or(|first| first > until);
            match asked.waiting.first_entry().filter(|waiting| is_next(waiting.key().0)) {
                Some(waiting) => {
                    let ((until, _), sender) = waiting.remove_entry();
                    asked.askers.insert(until, 1);
                    (until, sender)
                }
                None if first.is_none() => {
                    state.asked.remove(&question);
                    return;
                }
                None => return,
            }
        };
        // Whoever has gone has left the queue, too.
        drop(sender.send(Word::YourTurn(Asking { cache: Rc::clone(self), question, until })));
    }
}

impl Asking {
    /// The model has answered so, which is kept in this client's share.
    pub fn answered(self, reply: &Reply, client: Client) {
        let waiting = {
            let mut state = self.cache.0.borrow_mut();
            let waiting = state.asked.get_mut(&self.question).map(|asked| mem::take(&mut asked.waiting));
            let waiting = waiting.unwrap_or_default();
            // What is larger than all that may be kept takes nobody's place.
            let is_kept = bytes_of(&reply.outputs, &reply.shapes) <= state.max;
            if !is_kept && waiting.is_empty() {
                return;
            }
            let kept = Kept::of(reply);
            if is_kept {
                state.keep(self.question, client, kept.clone());
            }
            waiting.into_values().map(move |sender| (sender, kept.clone())).collect::<Vec<_>>()
        };
        for (sender, kept) in waiting {
            // Whoever has gone needs no answer.
            let _ = sender.send(Word::Answered(kept));
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.cache.handle_asked(self.question, self.until);
    }
}

impl Waiting {
    /// Waits for word: the answer, or the turn to ask.
    pub async fn wait(mut self) -> Turn {
        match (&mut self.word).await {
            Ok(Word::Answered(kept)) => Turn::Answered(kept),
            Ok(Word::YourTurn(asking)) => Turn::Ask(asking),
            Err(_) => unreachable!("who waits is told, or goes"),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(asked) = self.cache.0.borrow_mut().asked.get_mut(&self.question) {
            asked.waiting.remove(&self.place);
        }
        // Word that came and was not heard: a turn is dropped with it, and so passed on.
        self.word.close();
        drop(self.word.try_recv());
    }
}

#[cfg(test)]
mod tests;
