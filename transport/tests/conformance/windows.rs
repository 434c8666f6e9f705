//! Parts of a region that are opened by keys of their own, where the arm has that.

use transport::{Access, ConnectionId, Event, MemoryWindow, MemoryWindows, Region, RegionKey, Transfer, TransferError};

use crate::fabric::{Fabric, is_soft, pattern};

const BYTES: usize = 5000;
const WRITABLE_FROM: usize = 8192;

/// Two nodes, the second of which has a region that is open to nobody.
struct Closed {
    fabric: Fabric,
    ours: ConnectionId,
    region: Region,
    key: RegionKey,
    windows: MemoryWindows,
}

impl Closed {
    /// Nothing where the arm has no windows.
    fn new() -> Option<Self> {
        let mut fabric = Fabric::new(2);
        let (ours, _) = fabric.connect(0, 1);
        let endpoint = &mut fabric.nodes[1].endpoint;
        let region = Region::allocate(WRITABLE_FROM + BYTES).unwrap();
        let key = endpoint.register(&region, Access { remote_read: false, remote_write: false }).unwrap();
        let windows = endpoint.windows(&key);
        assert_eq!((windows.is_some(), endpoint.has_windows()), (is_soft(1), is_soft(1)));
        Some(Self { fabric, ours, region, key, windows: windows? })
    }

    fn window() -> MemoryWindow {
        let from = WRITABLE_FROM as u64;
        MemoryWindow { readable: 0..BYTES as u64, writable: from..from + BYTES as u64 }
    }

    fn transfer(&self, rkey: u32, token: u64, offset: usize) -> Transfer {
        let remote_address = self.key.address + offset as u64;
        Transfer { rkey, remote_address, ..self.fabric.transfer(0, 1, token, 0, BYTES) }
    }

    fn read(&mut self, rkey: u32, token: u64, offset: usize) -> Result<(), TransferError> {
        let transfer = self.transfer(rkey, token, offset);
        self.fabric.nodes[0].endpoint.read(self.ours, transfer).unwrap();
        match self.fabric.event(0) {
            Event::ReadDone { token: of, result, .. } if of == token => result,
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, rkey: u32, token: u64, offset: usize) -> Result<(), TransferError> {
        let transfer = self.transfer(rkey, token, offset);
        self.fabric.nodes[0].endpoint.write_with_immediate(self.ours, transfer, 1).unwrap();
        match self.fabric.event(0) {
            Event::WriteDone { token: of, result, .. } if of == token => result,
            other => panic!("{other:?}"),
        }
    }

    fn bytes(&self, offset: usize) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.region.read(offset, &mut bytes);
        bytes
    }
}

#[test]
fn a_window_is_read_and_written_where_it_says() {
    let Some(mut closed) = Closed::new() else { return };
    let (input, answer) = (pattern(1, BYTES), pattern(2, BYTES));
    closed.region.write(0, &input);
    for round in 0..100 {
        let key = closed.windows.bind(Closed::window());
        assert_eq!(closed.read(key, 2 * round, 0), Ok(()));
        assert!(closed.fabric.nodes[0].bytes(0, BYTES) == input);
        closed.fabric.nodes[0].region.write(0, &answer);
        assert_eq!(closed.write(key, 2 * round + 1, WRITABLE_FROM), Ok(()));
        assert!(closed.bytes(WRITABLE_FROM) == answer);
        assert!(closed.windows.unbind(key) && !closed.windows.unbind(key));
    }
}

#[test]
fn a_window_opens_nothing_else_and_nothing_once_it_is_unbound() {
    let refused = |ask: &dyn Fn(&mut Closed, u32) -> Result<(), TransferError>| {
        let Some(mut closed) = Closed::new() else { return };
        closed.fabric.nodes[0].region.write(0, &pattern(1, BYTES));
        let key = closed.windows.bind(Closed::window());
        assert_eq!(ask(&mut closed, key), Err(TransferError::RemoteAccess));
        assert!(closed.bytes(0).iter().chain(&closed.bytes(WRITABLE_FROM)).all(|&byte| byte == 0));
    };
    refused(&|closed, key| closed.read(key, 1, WRITABLE_FROM));
    refused(&|closed, key| closed.write(key, 1, 0));
    refused(&|closed, key| closed.read(key, 1, 1));
    refused(&|closed, key| closed.write(key, 1, WRITABLE_FROM - 1));
    refused(&|closed, key| closed.read(key ^ 1 << 9, 1, 0));
    refused(&|closed, _| closed.read(closed.key.rkey, 1, 0));
    refused(&|closed, key| {
        closed.windows.unbind(key);
        closed.read(key, 1, 0)
    });
    refused(&|closed, key| {
        closed.windows.unbind(key);
        let _other = closed.windows.bind(Closed::window());
        closed.write(key, 1, WRITABLE_FROM)
    });
}
