//! What one frontend is to be told of models.
//!
//! There may be thousands of models, and all of them are to be told to whoever joins. So each frontend has a list of
//! what it is to be told, each thing once, which goes out in [`Pages`]: a thing is told as it is when its turn comes,
//! however often it has changed since it was listed.

use std::collections::{BTreeSet, VecDeque};

use proto::{ChangeId, ModelId, Timestamp, Wait, pages::Pages};

/// Answers to changes that one frontend may leave unread.
pub(super) const ANSWERS_MAX: usize = 4_096;

/// Something that a frontend is to be told.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Topic {
    /// Who serves a model.
    Model(ModelId),
    /// What a model's requests take.
    RequestTimes(ModelId),
    /// What clients have made of a model.
    State(String),
    /// Whether a model, or a version of it, could be loaded.
    Failure(String, String),
    /// A change has ended, and why it changed nothing, if so. It is told after what it has made known.
    Changed(ChangeId, Option<String>),
}

/// What one frontend is yet to be told.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    /// In their order.
    waiting: VecDeque<Topic>,
    /// The same.
    listed: BTreeSet<Topic>,
    /// Those of them that a frontend can have as many of as it likes.
    answers: usize,
    pages: Pages,
    /// Since when, at least, the reader has left a page unread.
    unread_since: Option<Timestamp>,
}

impl Announcements {
    /// It is to be told of this.
    pub(super) fn list(&mut self, topic: Topic) {
        if self.listed.insert(topic.clone()) {
            self.answers += usize::from(matches!(topic, Topic::Changed(..)));
            self.waiting.push_back(topic);
        }
    }

    /// The next that may be told.
    pub(super) fn poll(&mut self) -> Option<Topic> {
        let topic = if self.pages.has_room() { self.waiting.pop_front()? } else { return None };
        self.listed.remove(&topic);
        self.answers -= usize::from(matches!(topic, Topic::Changed(..)));
        Some(topic)
    }

    /// A message of so many bytes was told. True if the page ends with it.
    pub(super) fn handle_told(&mut self, bytes: usize) -> bool {
        self.pages.handle_told(bytes)
    }

    /// A page was read. False if there was none.
    pub(super) fn handle_read(&mut self) -> bool {
        self.unread_since = None;
        self.pages.handle_read()
    }

    /// Whether a page has been left unread for too long; told once. It is to be asked again and again.
    pub(super) fn is_overdue(&mut self, now: Timestamp) -> bool {
        let since = (self.pages.unread() > 0).then(|| *self.unread_since.get_or_insert(now));
        let is_overdue = since.is_some_and(|since| since + Wait::Page.bound() <= now);
        if is_overdue {
            self.unread_since = Some(Timestamp::NEVER);
        }
        is_overdue
    }

    /// Answers to changes that it has yet to be told.
    pub(super) fn answers(&self) -> usize {
        self.answers
    }
}
