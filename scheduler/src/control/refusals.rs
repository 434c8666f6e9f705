//! Frontends that take no link of a backend any more, as that has broken its word to them. For the two of them that is
//! as if the backend could not reach the frontend, whatever the backend says; `reach` decides who of them stays out.

use std::collections::BTreeSet;

use proto::{BackendId, FrontendId, hello::Member};

/// Of members that are here.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeSet<(FrontendId, BackendId)>);

impl Refusals {
    /// Both must be here.
    pub(super) fn insert(&mut self, frontend: FrontendId, backend: BackendId) {
        self.0.insert((frontend, backend));
    }

    pub(super) fn has(&self, frontend: FrontendId, backend: BackendId) -> bool {
        self.0.contains(&(frontend, backend))
    }

    pub(super) fn handle_left(&mut self, member: Member) {
        self.0.retain(|&(frontend, backend)| match member {
            Member::Frontend(left) => frontend != left,
            Member::Backend(left) => backend != left,
        });
    }
}
