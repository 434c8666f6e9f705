//! How an ensemble whose steps are models of one task makes one answer of theirs (Clipper, section 5): by `parameters`
//! of its configuration, as Triton has no keys for it (docs/configuration.md).

use proto::Span;

/// The key of weights, which clients may change while it is served.
pub(crate) const WEIGHTS: &str = "weights";

/// Who is asked, and what becomes of what they predict.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// `selection` and the keys of that policy.
    pub policy: Policy,
    /// When two predictions of an output agree (`agreement:OUTPUT`), in the order of the outputs.
    pub agreements: Vec<Agreement>,
    /// One row of each output (`default:OUTPUT`), for clients that take it if there is no prediction; all outputs have
    /// one, or none has.
    pub defaults: Option<Vec<Vec<u8>>>,
    /// The least confidence of an answer that is not in doubt (`confidence`), 0 to 1.
    pub confidence: f64,
    /// What is left of the objective for making the answer and sending it (`reply_ms`).
    pub reply: Span,
    /// What policies that draw members at random begin with (`seed`).
    pub seed: u64,
}

/// Who is asked, and how much each counts.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// The first step.
    Static,
    /// All, each with one vote.
    Majority,
    /// All, with these weights (`weights`): finite, none below 0, one above.
    Weighted(Vec<f64>),
    /// One at random, the likelier the less it lost of late (Auer et al. 2002; Clipper, section 5.1.1).
    Exp3(Learning),
    /// All, each with the more weight the less it lost of late (Clipper, section 5.1.2).
    Exp4(Learning),
    /// The one that lost least of late, and now and then any.
    EpsilonGreedy(Learning),
    /// One after another in the order of the steps, until one is confident enough.
    Cascade,
    /// The first step, and a later one where it cannot answer in time.
    Fallback,
    /// One at random, each as likely as its weight says (`weights`, as above).
    Canary(Vec<f64>),
    /// The first step; the others are given this part of what it has answered (`mirrored`), and nobody waits for them.
    Shadow(f64),
}

/// How a policy learns from feedback.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Learning {
    /// How much one loss of 1 takes from the logarithm of a weight (`eta`); above 0, at most 10.
    pub eta: f64,
    /// The part of requests whose member is any (`exploration`, `epsilon`), 0 to 1.
    pub exploration: f64,
    /// Feedback counts for so many requests after its own (`window`).
    pub window: u64,
}

/// Found by simulating Clipper's Figure 8 (`figures/src/clipper8.rs`): a window of 800 requests forgets within 500 what
/// a model was before it degraded, and remembers enough to tell models apart.
impl Learning {
    /// Of Exp3, unless it is configured.
    pub const EXP3: Self = Self { eta: 0.03, exploration: 0.1, window: 800 };
    /// Of Exp4.
    pub const EXP4: Self = Self { eta: 0.1, exploration: 0.0, window: 800 };
    /// Of epsilon-greedy, whose weights are no exponentials.
    pub const EPSILON_GREEDY: Self = Self { eta: 1.0, exploration: 0.05, window: 800 };
}

/// When two predictions of an output agree, for each row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Agreement {
    /// All bytes are the same.
    Equal,
    /// The largest element is the same.
    Argmax,
    /// No element differs by more.
    Within(f64),
}

impl Policy {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Majority => "majority",
            Self::Weighted(_) => "weighted",
            Self::Exp3(_) => "exp3",
            Self::Exp4(_) => "exp4",
            Self::EpsilonGreedy(_) => "epsilon_greedy",
            Self::Cascade => "cascade",
            Self::Fallback => "fallback",
            Self::Canary(_) => "canary",
            Self::Shadow(_) => "shadow",
        }
    }

    /// How it learns, if it does.
    #[must_use]
    pub fn learning(&self) -> Option<&Learning> {
        match self {
            Self::Exp3(learning) | Self::Exp4(learning) | Self::EpsilonGreedy(learning) => Some(learning),
            Self::Static
            | Self::Majority
            | Self::Weighted(_)
            | Self::Cascade
            | Self::Fallback
            | Self::Canary(_)
            | Self::Shadow(_) => None,
        }
    }

    /// Whether outputs of numbers are averaged, where others are voted on.
    #[must_use]
    pub fn averages(&self) -> bool {
        matches!(self, Self::Weighted(_) | Self::Exp4(_))
    }
}
