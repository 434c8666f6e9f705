//! How operators call the members that have joined: as they call themselves, and no two of a kind alike.

use std::collections::BTreeMap;

use proto::{draining::MemberKind, hello::Member, member_name::is_member_name};

/// By member.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<Member, String>);

impl Names {
    /// A member has joined that calls itself `name`. One of a name that another one of its kind has gets its id behind
    /// it: that is how it is shown.
    pub(super) fn add(&mut self, member: Member, name: String) {
        let (kind, id) = match member {
            Member::Frontend(id) => ("frontend", id.0),
            Member::Backend(id) => ("backend", id.0),
        };
        let is_taken =
            self.0.iter().any(|(other, taken)| *other != member && is_alike(other, &member) && *taken == name);
        let shown = if is_taken { format!("{name}#{id}") } else { name.clone() };
        if is_taken {
            tracing::warn!(
                "name: found a second {kind} called {name}, expected names of their own; it is {shown} here"
            );
        }
        self.0.insert(member, shown);
    }

    /// It has left. One that has come back before that was noticed is called by its name alone from now on.
    pub(super) fn remove(&mut self, member: Member) {
        let Some(name) = self.0.remove(&member) else { return };
        let has_id = |shown: &str| shown.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('#'));
        if let Some((_, shown)) = self.0.iter_mut().find(|(other, shown)| is_alike(other, &member) && has_id(shown)) {
            *shown = name;
        }
    }

    /// Who is called so.
    pub(super) fn find(&self, kind: MemberKind, shown: &str) -> Option<Member> {
        self.0.iter().find(|(member, name)| kind.is_of(**member) && *name == shown).map(|(member, _)| *member)
    }

    /// What a member is called, if it is here.
    pub(super) fn of(&self, member: Member) -> Option<&str> {
        self.0.get(&member).map(String::as_str)
    }
}

/// Whether both are frontends, or backends.
fn is_alike(one: &Member, other: &Member) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

/// Whether a member may call itself so.
///
/// # Errors
/// The length of a name that nobody may have.
pub(super) fn check(name: &str) -> Result<(), usize> {
    if is_member_name(name) { Ok(()) } else { Err(name.len()) }
}

#[cfg(test)]
mod tests {
    use proto::{BackendId, FrontendId};

    use super::*;

    #[test]
    fn no_two_of_a_kind_are_shown_alike() {
        let mut names = Names::default();
        let [one, other] = [3, 4].map(|id| Member::Backend(BackendId(id)));
        let frontend = Member::Frontend(FrontendId(3));
        for member in [one, other, frontend] {
            names.add(member, "a".to_owned());
        }
        let shown = |names: &Names| [one, other, frontend].map(|member| names.of(member).map(str::to_owned));
        assert_eq!(shown(&names), [Some("a"), Some("a#4"), Some("a")].map(|name| name.map(str::to_owned)));
        assert_eq!(names.find(MemberKind::Backend, "a#4"), Some(other));
        assert_eq!(
            [MemberKind::Frontend, MemberKind::Backend].map(|kind| names.find(kind, "a")),
            [frontend, one].map(Some)
        );
        names.remove(frontend);
        assert_eq!(shown(&names)[1].as_deref(), Some("a#4"), "backends are called as before");
        names.remove(one);
        assert_eq!(shown(&names), [None, Some("a".to_owned()), None]);
        assert_eq!(names.find(MemberKind::Backend, "a"), Some(other));
        // It joins again.
        names.add(other, "a".to_owned());
        assert_eq!(shown(&names), [None, Some("a".to_owned()), None]);
        assert_eq!((check("a"), check(""), check("a#4")), (Ok(()), Err(0), Err(3)));
    }
}
