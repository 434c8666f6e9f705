//! How two processes of a host come to share memory. One invites, by the name of a Unix socket that only the two know:
//! 128 random bits, told over the authenticated bootstrap. The other comes, or does not: in another network namespace
//! or as another user it cannot. Each then hands over the memory in which it will read what the other writes, and both
//! keep the connection, to wake each other.
//!
//! Nothing here waits: who has come has said all that it has to say when the bootstrap tells of it.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    fmt::Write as _,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::{
    cmsg_space,
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recv, recvmsg, send,
        sendmsg, socket_with, sockopt::socket_peercred,
    },
    process::geteuid,
};

use crate::{bootstrap::RingName, sealed_memory::SealedMemory};

/// What comes with memory: of another version nothing is taken.
const HELLO: &[u8] = b"downbeat ring 1";

/// A socket that waits for one process.
pub(super) struct Invitation {
    listener: OwnedFd,
    pub(super) name: RingName,
}

/// What has come over the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    /// The other end has written something for us.
    Bell,
    /// The other end is gone.
    End,
}

impl Invitation {
    pub(super) fn open() -> io::Result<Self> {
        let (listener, name) = (unix_socket()?, RingName(rand::random()));
        bind(&listener, &address(name)?)?;
        listen(&listener, 1)?;
        Ok(Self { listener, name })
    }

    /// Who has come; `None` if nobody yet.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(came) => own_user(came).map(Some),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Follows an invitation.
pub(super) fn come(name: RingName) -> io::Result<OwnedFd> {
    let socket = unix_socket()?;
    connect(&socket, &address(name)?)?;
    own_user(socket)
}

/// Hands memory over.
pub(super) fn hand_over(to: &OwnedFd, memory: &SealedMemory) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: [BorrowedFd<'_>; 1] = [memory.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(to, &[IoSlice::new(HELLO)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes the memory that the other end hands over; `None` if it has not yet.
pub(super) fn take_over(from: &OwnedFd, bytes: usize) -> io::Result<Option<SealedMemory>> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let (mut control, mut hello) = (RecvAncillaryBuffer::new(&mut space), [0; HELLO.len() + 1]);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(from, &mut [IoSliceMut::new(&mut hello)], &mut control, flags) {
        Ok(received) => received,
        Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match descriptor {
        Some(memory) if hello[..received.bytes] == *HELLO => SealedMemory::check(memory, bytes).map(Some),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the peer hands over no memory for a ring")),
    }
}

/// Wakes the other end. If its socket is full, it has reasons enough to wake up; if it is gone, the bootstrap tells.
pub(super) fn wake(other: &OwnedFd) {
    let _ = send(other, b"!", SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Takes one message of those by which the other end wakes us.
pub(super) fn hear(other: &OwnedFd) -> Heard {
    match recv(other, &mut [0u8; 8], RecvFlags::DONTWAIT) {
        Ok((1.., _)) => Heard::Bell,
        Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
        Ok((0, _)) | Err(_) => Heard::End,
    }
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// In the abstract namespace, which belongs to the network namespace and to no file system (unix(7)).
fn address(name: RingName) -> io::Result<SocketAddrUnix> {
    let mut path = String::from("downbeat-ring-");
    for byte in name.0 {
        let _ = write!(path, "{byte:02x}");
    }
    Ok(SocketAddrUnix::new_abstract_name(path.as_bytes())?)
}

/// A connection, if the other end is a process of our user.
fn own_user(connection: OwnedFd) -> io::Result<OwnedFd> {
    let (other, own) = (socket_peercred(&connection)?.uid, geteuid());
    if other != own {
        let cause = format!("user {} cannot share memory with user {}", own.as_raw(), other.as_raw());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, cause));
    }
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    const BYTES: usize = 4096;

    #[test]
    fn who_is_invited_comes_once_and_both_share_memory_and_wake_each_other() {
        let invitation = Invitation::open().unwrap();
        assert!(invitation.accept().unwrap().is_none(), "nobody came");
        let guest = come(invitation.name).unwrap();
        let memory = SealedMemory::create(BYTES).unwrap();
        hand_over(&guest, &memory).unwrap();
        let host = invitation.accept().unwrap().unwrap();
        let taken = take_over(&host, BYTES).unwrap().unwrap();
        Region::map_shared(&memory).unwrap().write(8, b"from the guest");
        let mut bytes = [0; 14];
        Region::map_shared(&taken).unwrap().read(8, &mut bytes);
        assert_eq!(&bytes, b"from the guest");
        assert!(take_over(&host, BYTES).unwrap().is_none());
        wake(&guest);
        assert_eq!([hear(&host), hear(&host), hear(&guest)], [Heard::Bell, Heard::Nothing, Heard::Nothing]);
        drop(guest);
        assert_eq!(hear(&host), Heard::End);
        wake(&host);
    }

    #[test]
    fn nobody_comes_where_nobody_invites_and_what_is_no_memory_is_refused() {
        assert!(come(RingName([7; 16])).is_err());
        let invitation = Invitation::open().unwrap();
        let guest = come(invitation.name).unwrap();
        let host = invitation.accept().unwrap().unwrap();
        wake(&guest);
        assert!(take_over(&host, BYTES).unwrap_err().to_string().contains("no memory"));
        hand_over(&guest, &SealedMemory::create(2 * BYTES).unwrap()).unwrap();
        assert!(take_over(&host, BYTES).unwrap_err().to_string().contains("8192 bytes"));
        send(&guest, b"downbeat ring 2", SendFlags::DONTWAIT).unwrap();
        assert!(take_over(&host, BYTES).is_err());
    }
}
