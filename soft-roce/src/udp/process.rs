//! Addresses that drivers of this process share among themselves, and with no other process.
//!
//! The kernel lets all sockets of a user that say so share an address, whichever process they are of. So the first
//! driver of a process makes sure that nobody has the address, by binding it alone for a moment; later ones need not.
//! Why not one socket for all: each thread receives and sends without a lock, and the kernel steers, as between
//! processes.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{DriverConfig, Sharing, socket::Socket};

/// How many drivers of this process have an address.
static DRIVERS: Mutex<BTreeMap<SocketAddr, usize>> = Mutex::new(BTreeMap::new());

fn drivers() -> MutexGuard<'static, BTreeMap<SocketAddr, usize>> {
    // A count is never left half changed.
    DRIVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One driver's part in an address of this process. To be dropped after its socket.
pub(super) struct Held {
    address: SocketAddr,
}

impl Held {
    /// Binds one more socket to an address of this process.
    ///
    /// # Errors
    /// As [`Socket::bind`] of an address that nobody else may have.
    pub(super) fn bind(address: SocketAddr, config: &DriverConfig) -> io::Result<(Socket, Self)> {
        // Held meanwhile, so that another thread does not meet the socket that only looks.
        let mut drivers = drivers();
        if !drivers.contains_key(&address) {
            Socket::bind(address, &DriverConfig { sharing: Sharing::Alone, ..*config })?;
        }
        let socket = Socket::bind(address, config)?;
        *drivers.entry(address).or_default() += 1;
        Ok((socket, Self { address }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut drivers = drivers();
        if let Some(count) = drivers.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                drivers.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_this_process_s_until_its_last_driver_closes() {
        let address: SocketAddr = "127.55.44.34:4791".parse().unwrap();
        let sharing = |sharing| DriverConfig { sharing, ..DriverConfig::default() };
        let bind = || Held::bind(address, &sharing(Sharing::Process));
        // Another process of this user that would share the address.
        let other = Socket::bind(address, &sharing(Sharing::User)).unwrap();
        let refused = bind().err().expect("refused").to_string();
        assert!(refused.contains("another process has it"), "{refused}");
        drop(other);
        let (first, second) = (bind().unwrap(), bind().unwrap());
        assert!(Socket::bind(address, &DriverConfig::default()).is_err(), "it is taken");
        drop(first);
        let third = bind().unwrap();
        drop((second, third));
        assert_eq!(drivers().get(&address), None);
        Socket::bind(address, &DriverConfig::default()).expect("free again");
    }
}
