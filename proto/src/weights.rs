//! What models take in a GPU's memory, where that holds but a part of what is hosted (Clockwork, section 4.2).

use wincode::{SchemaRead, SchemaWrite};

use crate::time::Span;

/// Memory for weights is dealt in pages of so many bytes (Clockwork, section 4.2).
pub const PAGE_BYTES: u64 = 16 << 20;

/// Pages of one GPU that are believed: 16 TiB.
pub const PAGES_MAX: u32 = 1 << 20;

/// The longest load that is believed: what takes longer can serve nobody.
pub const LOAD_MAX: Span = Span::from_millis(600_000);

/// A backend tells what has become of weights not more often than this.
pub const TALLY_INTERVAL: Span = Span::from_millis(100);

/// A model's weights. None by default: they are wherever the model is hosted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct Weights {
    /// Pages of a GPU's memory ([`PAGE_BYTES`]).
    pub pages: u32,
    /// From host memory to a GPU's, while nothing else is on that way.
    pub load: Span,
    /// What a load takes besides, while the weights are on disk only.
    pub read: Span,
}

impl Weights {
    /// Of a model that is always in host memory.
    #[must_use]
    pub const fn new(pages: u32, load: Span) -> Self {
        Self { pages, load, read: Span::ZERO }
    }

    /// What serves two backends that offer the same model: the larger and the slower of each.
    #[must_use]
    pub fn largest(self, other: Self) -> Self {
        let (load, read) = (self.load.max(other.load), self.read.max(other.read));
        Self { pages: self.pages.max(other.pages), load, read }
    }
}

/// What has become of weights in the memories of a backend, or of all: counts of its life so far, and what is there
/// now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct WeightsTally {
    /// Loads that ended with the weights in memory.
    pub loads: u64,
    /// Of these, loads whose weights were read from disk.
    pub reads: u64,
    /// Loads that could not start in time, had no room, or failed.
    pub failed: u64,
    /// Weights that made room.
    pub evictions: u64,
    /// Batches that were rejected because their weights were not there.
    pub absent: u64,
    /// How long the ways into the GPUs' memories were in use.
    pub busy: Span,
    /// Pages of all GPUs whose memory is short.
    pub pages: u64,
    /// Those that something is in, or on its way to.
    pub pages_used: u64,
    /// Pages of host memory, where that is bounded.
    pub host_pages: u64,
    /// Those that something is in, or is being read into.
    pub host_pages_used: u64,
}

impl WeightsTally {
    /// Of both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            loads: self.loads.saturating_add(other.loads),
            reads: self.reads.saturating_add(other.reads),
            failed: self.failed.saturating_add(other.failed),
            evictions: self.evictions.saturating_add(other.evictions),
            absent: self.absent.saturating_add(other.absent),
            busy: Span(self.busy.0.saturating_add(other.busy.0)),
            pages: self.pages.saturating_add(other.pages),
            pages_used: self.pages_used.saturating_add(other.pages_used),
            host_pages: self.host_pages.saturating_add(other.host_pages),
            host_pages_used: self.host_pages_used.saturating_add(other.host_pages_used),
        }
    }

    /// What is left of it when its backend is gone: the counts.
    #[must_use]
    pub fn past(self) -> Self {
        Self { pages: 0, pages_used: 0, host_pages: 0, host_pages_used: 0, ..self }
    }
}
