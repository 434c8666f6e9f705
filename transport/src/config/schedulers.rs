//! Where a member's schedulers are: one, or several of which one is obeyed.

use crate::Address;

/// Schedulers that a list can have: a member keeps a session with each of them.
pub const SCHEDULERS_MAX: usize = 16;

/// The schedulers that a configuration names by its two keys: one as `scheduler`, or several as `schedulers`, the first
/// first.
///
/// # Errors
/// One line that names the key, what was found and what was expected: if both keys are there or neither is, if there
/// are more than [`SCHEDULERS_MAX`], or one of them is there twice.
pub fn scheduler_list(scheduler: Option<&Address>, schedulers: &[Address]) -> Result<Vec<Address>, String> {
    match (scheduler, schedulers) {
        (Some(_), [_, ..]) => Err("scheduler, schedulers: found both keys, expected one of them".to_owned()),
        (None, []) => Err("scheduler, schedulers: found no address, expected one of these keys".to_owned()),
        (Some(scheduler), []) => Ok(vec![scheduler.clone()]),
        (None, _) if schedulers.len() > SCHEDULERS_MAX => {
            let found = schedulers.len();
            Err(format!("schedulers: found {found} addresses, expected at most {SCHEDULERS_MAX}"))
        }
        (None, _) => match (1..schedulers.len()).find(|&index| schedulers[..index].contains(&schedulers[index])) {
            Some(index) => Err(format!("schedulers: found {} twice, expected each address once", schedulers[index])),
            None => Ok(schedulers.to_vec()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(ports: impl IntoIterator<Item = u16>) -> Vec<Address> {
        ports.into_iter().map(|port| ([127, 0, 0, 1], port).into()).collect()
    }

    #[test]
    fn one_of_the_two_keys_names_each_scheduler_once() {
        let (one, two) = (addresses([7400]), addresses([7401, 7400]));
        assert_eq!(scheduler_list(Some(&one[0]), &[]), Ok(one.clone()));
        assert_eq!(scheduler_list(None, &one), Ok(one.clone()));
        assert_eq!(scheduler_list(None, &two), Ok(two.clone()), "in the order of the list");
        let most = addresses(0..SCHEDULERS_MAX as u16);
        assert_eq!(scheduler_list(None, &most), Ok(most));
    }

    #[test]
    fn what_is_wrong_with_the_keys_is_said_in_one_line() {
        let error = |scheduler, ports: &[u16]| {
            scheduler_list(scheduler, &addresses(ports.iter().copied())).expect_err("it is wrong")
        };
        let one: Address = "a.example:7400".parse().unwrap();
        assert_eq!(error(Some(&one), &[7401]), "scheduler, schedulers: found both keys, expected one of them");
        assert_eq!(error(None, &[]), "scheduler, schedulers: found no address, expected one of these keys");
        let twice = "schedulers: found 127.0.0.1:7401 twice, expected each address once";
        assert_eq!(error(None, &[7400, 7401, 7402, 7401]), twice);
        let many: Vec<u16> = (0..17).collect();
        assert_eq!(error(None, &many), "schedulers: found 17 addresses, expected at most 16");
    }
}
