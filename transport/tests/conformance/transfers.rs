//! One-sided transfers: every length, every byte, and what is refused.

use std::{fs::File, os::fd::OwnedFd, sync::Arc};

use proto::Timestamp;
use transport::{DeviceMemory, Event, Region, Transfer, TransferError, Way};

use crate::fabric::{Fabric, REGION_BYTES, is_soft, pattern};

/// Around the path MTU of Ethernet, 1024, of large frames, 4096, and of a host, 57,344; and large.
const LENGTHS: [usize; 16] =
    [0, 1, 2, 3, 4, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 57_344, 57_345, 64 * 1024, 1024 * 1024];

#[test]
fn reads_of_every_length() {
    let mut fabric = Fabric::new(2);
    let (connection, _) = fabric.connect(0, 1);
    for (token, length) in (1..).zip(LENGTHS) {
        // An odd place, so that nothing is aligned by luck.
        let offset = 4096 + token as usize;
        let bytes = pattern(token, length);
        fabric.nodes[1].region.write(offset, &bytes);
        fabric.nodes[0].region.write(offset - 1, &vec![0xaa; length + 2]);
        let transfer = fabric.transfer(0, 1, token, offset, length);
        fabric.nodes[0].endpoint.read(connection, transfer).unwrap();
        assert_eq!(fabric.event(0), Event::ReadDone { connection, token, result: Ok(()) });
        let expected: Vec<u8> = [&[0xaa], &bytes[..], &[0xaa]].concat();
        assert!(fabric.nodes[0].bytes(offset - 1, length + 2) == expected, "READ of {length} bytes");
    }
    fabric.quiet(1);
}

/// Memory that is said to be another device's. Here it is the host's, which every RDMA device reaches by its address;
/// what is said to be its dma-buf is none.
#[allow(unsafe_code, reason = "a device's word is given for it")]
fn device_memory(region: &Region, address: u64, has_dma_buf: bool) -> DeviceMemory {
    let dma_buf = has_dma_buf.then(|| OwnedFd::from(File::open("/dev/null").unwrap()));
    // SAFETY: the memory is a region's, which may be written by anybody, and a clone of it is kept; or there is none.
    unsafe { DeviceMemory::new(address, region.len(), dma_buf, Arc::new(region.clone())) }
}

#[test]
fn reads_land_in_another_devices_memory() {
    let mut fabric = Fabric::new(2);
    let memory = Region::allocate(64 * 1024).unwrap();
    let nowhere = device_memory(&memory, 1 << 46, true);
    let refused = fabric.nodes[0].endpoint.register_device_memory(&nowhere).unwrap_err().to_string();
    let ours = device_memory(&memory, memory.address(), false);
    let registered = fabric.nodes[0].endpoint.register_device_memory(&ours);
    if is_soft(0) {
        assert!(refused.contains("soft-RoCE copies with the CPU"), "{refused}");
        assert_eq!(registered.unwrap_err().to_string(), refused);
        return;
    }
    assert!(refused.contains("takes it neither as a dma-buf (") && refused.contains("nvidia-peermem"), "{refused}");
    let (lkey, way) = registered.unwrap();
    assert_eq!(way, Way::Address);
    let (connection, _) = fabric.connect(0, 1);
    for (token, length) in (1..).zip([1, 4097, 60_000]) {
        let bytes = pattern(token, length);
        fabric.nodes[1].region.write(0, &bytes);
        memory.write(0, &vec![0xaa; memory.len()]);
        let transfer = Transfer { lkey, local_offset: 3, ..fabric.transfer(0, 1, token, 0, length) };
        fabric.nodes[0].endpoint.read(connection, transfer).unwrap();
        assert_eq!(fabric.event(0), Event::ReadDone { connection, token, result: Ok(()) });
        let mut found = vec![0; length + 4];
        memory.read(0, &mut found);
        assert!(found == [&[0xaa; 3], &bytes[..], &[0xaa]].concat(), "READ of {length} bytes");
    }
}

#[test]
fn writes_of_every_length() {
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    for (token, length) in (1..).zip(LENGTHS) {
        let offset = 4096 + token as usize;
        let bytes = pattern(token, length);
        fabric.nodes[0].region.write(offset, &bytes);
        fabric.nodes[1].region.write(offset - 1, &vec![0xaa; length + 2]);
        let transfer = fabric.transfer(0, 1, token, offset, length);
        let immediate = 0xdead_0000 + token as u32;
        fabric.nodes[0].endpoint.write_with_immediate(ours, transfer, immediate).unwrap();
        assert_eq!(fabric.event(1), Event::Immediate { connection: theirs, immediate, bytes: length as u32 });
        let expected: Vec<u8> = [&[0xaa], &bytes[..], &[0xaa]].concat();
        assert!(fabric.nodes[1].bytes(offset - 1, length + 2) == expected, "WRITE of {length} bytes");
        assert_eq!(fabric.event(0), Event::WriteDone { connection: ours, token, result: Ok(()) });
    }
}

#[test]
fn writes_and_frames_keep_their_order() {
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    let mut expected = Vec::new();
    for number in 0..200u32 {
        let transfer = fabric.transfer(0, 1, number.into(), 0, 3000);
        let node = &mut fabric.nodes[0].endpoint;
        node.send(ours, &number.to_be_bytes()).unwrap();
        node.write_with_immediate(ours, transfer, number).unwrap();
        expected.push(Event::Message { connection: theirs, frame: number.to_be_bytes().to_vec() });
        expected.push(Event::Immediate { connection: theirs, immediate: number, bytes: 3000 });
    }
    let got: Vec<_> = (0..400).map(|_| fabric.event(1)).collect();
    assert_eq!(got, expected);
    for token in 0..200 {
        assert_eq!(fabric.event(0), Event::WriteDone { connection: ours, token, result: Ok(()) });
    }
}

#[test]
fn many_reads_at_once_and_one_larger_than_any_buffer() {
    let mut fabric = Fabric::new(2);
    let (connection, _) = fabric.connect(0, 1);
    let bytes = pattern(9, REGION_BYTES);
    fabric.nodes[1].region.write(0, &bytes);
    let whole = fabric.transfer(0, 1, 0, 0, REGION_BYTES);
    fabric.nodes[0].endpoint.read(connection, whole).unwrap();
    assert_eq!(fabric.event(0), Event::ReadDone { connection, token: 0, result: Ok(()) });
    assert!(fabric.nodes[0].bytes(0, REGION_BYTES) == bytes);
    fabric.nodes[0].region.write(0, &vec![0; REGION_BYTES]);
    let each = REGION_BYTES / 512;
    for token in 0..512 {
        let part = fabric.transfer(0, 1, token, token as usize * each, each);
        fabric.nodes[0].endpoint.read(connection, part).unwrap();
    }
    for token in 0..512 {
        assert_eq!(fabric.event(0), Event::ReadDone { connection, token, result: Ok(()) });
    }
    assert!(fabric.nodes[0].bytes(0, REGION_BYTES) == bytes);
}

/// What a bad transfer leads to on the side that asked, and that the other side's memory is as it was.
fn refused(write: bool, spoil: impl Fn(&Fabric, &mut Transfer)) {
    let mut fabric = Fabric::new(3);
    let (ours, theirs) = fabric.connect(0, 1);
    let (bystander, _) = fabric.connect(2, 1);
    fabric.nodes[0].region.write(0, &pattern(1, 5000));
    let mut transfer = fabric.transfer(0, 1, 7, 0, 5000);
    spoil(&fabric, &mut transfer);
    let node = &mut fabric.nodes[0].endpoint;
    let result = Err(TransferError::RemoteAccess);
    let (first, second) = if write {
        node.write_with_immediate(ours, transfer, 1).unwrap();
        node.write_with_immediate(ours, Transfer { token: 8, ..transfer }, 2).unwrap();
        (
            Event::WriteDone { connection: ours, token: 7, result },
            Event::WriteDone { connection: ours, token: 8, result: Err(TransferError::Flushed) },
        )
    } else {
        node.read(ours, transfer).unwrap();
        node.read(ours, Transfer { token: 8, ..transfer }).unwrap();
        (
            Event::ReadDone { connection: ours, token: 7, result },
            Event::ReadDone { connection: ours, token: 8, result: Err(TransferError::Flushed) },
        )
    };
    assert_eq!((fabric.event(0), fabric.event(0)), (first, second));
    assert!(fabric.disconnected(0, ours).contains("refused the address or key"));
    fabric.disconnected(1, theirs);
    assert!(fabric.nodes[1].bytes(0, REGION_BYTES).iter().all(|&byte| byte == 0));
    // Others lose nothing.
    let transfer = fabric.transfer(2, 1, 9, 0, 5000);
    fabric.nodes[2].endpoint.read(bystander, transfer).unwrap();
    assert_eq!(fabric.event(2), Event::ReadDone { connection: bystander, token: 9, result: Ok(()) });
}

#[test]
fn a_wrong_key_is_refused() {
    refused(false, |_, transfer| transfer.rkey ^= 0x40);
    refused(true, |_, transfer| transfer.rkey ^= 0x40);
}

#[test]
fn an_address_outside_is_refused() {
    refused(false, |_, transfer| transfer.remote_address += REGION_BYTES as u64 - 4999);
    refused(true, |_, transfer| transfer.remote_address -= 1);
}

#[test]
fn a_region_without_permission_is_refused() {
    let mut fabric = Fabric::new(2);
    let (ours, _) = fabric.connect(0, 1);
    let region = Region::allocate(8192).unwrap();
    let access = transport::Access { remote_read: true, remote_write: false };
    let key = fabric.nodes[1].endpoint.register(&region, access).unwrap();
    let transfer = Transfer { remote_address: key.address, rkey: key.rkey, ..fabric.transfer(0, 1, 1, 0, 100) };
    fabric.nodes[0].endpoint.read(ours, transfer).unwrap();
    assert_eq!(fabric.event(0), Event::ReadDone { connection: ours, token: 1, result: Ok(()) });
    fabric.nodes[0].endpoint.write_with_immediate(ours, Transfer { token: 2, ..transfer }, 5).unwrap();
    let result = Err(TransferError::RemoteAccess);
    assert_eq!(fabric.event(0), Event::WriteDone { connection: ours, token: 2, result });
}

/// Regression: one call of `drive` left packets behind, and a caller who then slept woke up by a retransmission timer.
#[test]
fn a_caller_who_sleeps_after_one_drive_leaves_no_packet_behind() {
    let mut fabric = Fabric::new(2);
    let connections: Vec<_> = (0..48).map(|_| fabric.connect(0, 1).0).collect();
    let transfer = fabric.transfer(0, 1, 0, 0, 1024 * 1024);
    let now = fabric.now();
    let node = &mut fabric.nodes[0].endpoint;
    for connection in connections {
        node.write_with_immediate(connection, transfer, 0).unwrap();
    }
    let mut calls = 0;
    while node.poll_timeout() == Some(Timestamp::PAST) {
        node.drive(now);
        calls += 1;
    }
    assert!(calls > 1 || !is_soft(0), "one call sent everything: no bound was met");
    let sent = node.counters().map(|counters| counters.packets_sent);
    node.drive(now);
    assert_eq!(node.counters().map(|counters| counters.packets_sent), sent);
}
