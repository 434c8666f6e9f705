//! The advice as it is told, with its reason in words.

use std::{fmt, sync::Arc};

use proto::{ModelId, Span, Timestamp};

use super::{Rates, Standing, with_spare};

/// How many GPUs are needed in all. Averages are over the window.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Advice {
    /// GPUs that plans go to.
    pub gpus: u32,
    /// How many are needed; `None` while that is not known.
    pub needed: Option<u32>,
    /// GPUs that ran batches of tasks with an objective.
    pub busy: f64,
    /// GPUs that the tasks would keep busy at the price at which GPUs are paid for.
    pub work: f64,
    /// Tasks that are lost, of all: the paper's r.
    pub lost_part: f64,
    /// Tasks in time, since this scheduler is the primary.
    pub in_time: u64,
    /// Tasks that were lost, since this scheduler is the primary.
    pub lost: u64,
    /// Nothing is advised for so long.
    pub known_in: Span,
    /// From the wish for a GPU until it serves.
    pub gpu_comes_after: Span,
    /// It is the primary's.
    pub is_primary: bool,
    /// By the models that they host.
    pub sub_clusters: Vec<SubCluster>,
}

/// The same of GPUs that host the same models.
#[derive(Debug, Clone, PartialEq)]
pub struct SubCluster {
    /// What they host; ascending.
    pub models: Arc<Vec<ModelId>>,
    /// GPUs that plans go to; 0 if all have gone, and nobody else hosts all of the models.
    pub gpus: u32,
    /// How many are needed; `None` while that is not known.
    pub needed: Option<u32>,
    /// GPUs that ran batches, where all GPUs that host a model run alike.
    pub busy: f64,
    /// As [`Advice::work`].
    pub work: f64,
    /// As [`Advice::lost_part`].
    pub lost_part: f64,
    /// What asks for them.
    pub reason: Reason,
    /// For how long so many are needed.
    pub stands_for: Span,
}

/// What asks for GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Not known yet.
    Unknown,
    /// The work.
    Work,
    /// The work of a while ago: fewer would do now, and may not in a moment.
    Held,
    /// What is lost.
    Losses,
    /// All have gone.
    Gone,
}

impl SubCluster {
    pub(super) fn new(
        (models, gpus): (Arc<Vec<ModelId>>, u32),
        rates: &Rates,
        standing: Option<&Standing>,
        now: Timestamp,
    ) -> Self {
        let reason = match standing {
            None => Reason::Unknown,
            Some(_) if gpus == 0 => Reason::Gone,
            Some(standing) if standing.fewer.is_some() => Reason::Held,
            Some(standing) if standing.is_for_losses => Reason::Losses,
            Some(_) => Reason::Work,
        };
        let stands_for = standing.map_or(Span::ZERO, |standing| now - standing.since);
        let &Rates { busy, work, .. } = rates;
        let (lost_part, needed) = (rates.lost_part(), standing.map(|standing| standing.needed));
        Self { models, gpus, needed, busy, work, lost_part, reason, stands_for }
    }

    /// How many more are needed, or fewer.
    fn off(&self) -> u32 {
        self.needed.map_or(0, |needed| needed.abs_diff(self.gpus))
    }
}

impl fmt::Display for SubCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpus, work, lost_part, .. } = self;
        match self.reason {
            Reason::Unknown => write!(f, "not known yet"),
            Reason::Work => {
                let spare = with_spare(*work) - work;
                write!(f, "work for {work:.1} GPUs, and {spare:.1} to spare")
            }
            Reason::Held => {
                write!(f, "more than the work for {work:.1} GPUs takes, until it was so little for a while")
            }
            Reason::Losses => write!(f, "{:.1} % of the tasks were lost with {gpus} GPUs", 100.0 * lost_part),
            Reason::Gone => write!(f, "all GPUs that hosted these models have gone"),
        }
    }
}

impl Advice {
    /// Part of the GPUs' time in which no task with an objective ran: the paper's f.
    #[must_use]
    pub fn idle_part(&self) -> f64 {
        if self.gpus == 0 { 0.0 } else { (1.0 - self.busy / f64::from(self.gpus)).clamp(0.0, 1.0) }
    }

    /// The reason in words.
    #[must_use]
    pub fn reason(&self) -> String {
        let Some(needed) = self.needed else { return self.why_unknown() };
        let furthest = self.sub_clusters.iter().reduce(|one, other| if other.off() > one.off() { other } else { one });
        let Some(sub) = furthest else { return String::new() };
        let mut text = match self.sub_clusters.len() {
            1 => sub.to_string(),
            count => format!("the sum of {count} sub-clusters; where it is furthest off: {sub}"),
        };
        if needed > self.gpus && sub.needed.is_some_and(|needed| needed > sub.gpus) {
            let asked_s = sub.stands_for.as_secs_f64();
            text += &format!("; more are needed for {asked_s:.0} s");
            if sub.stands_for > self.gpu_comes_after {
                text += &format!(", and one should come within {:.0} s", self.gpu_comes_after.as_secs_f64());
            }
        }
        text
    }

    fn why_unknown(&self) -> String {
        match self.known_in {
            _ if !self.is_primary => "this scheduler is not the primary".to_owned(),
            known_in if known_in > Span::ZERO => {
                format!("not known for {:.0} s more: a window has to pass", known_in.as_secs_f64().ceil())
            }
            _ => "there is no GPU to judge by".to_owned(),
        }
    }
}
