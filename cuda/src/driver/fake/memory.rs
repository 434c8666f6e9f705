//! Addresses, pages, and what is in them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use proto::weights::PAGE_BYTES;

use super::super::{Address, Page};

const BLOCK_BYTES: u64 = 64 << 10;
/// What is in memory that nobody wrote: as a floating-point number not one.
const GARBAGE: u8 = 0xff;
/// Where addresses begin.
const FIRST_ADDRESS: u64 = 1 << 40;

/// A GPU's memory.
#[derive(Debug)]
pub(super) struct Memory {
    pages_max: usize,
    /// Bytes of each reservation, by its first address.
    reserved: BTreeMap<u64, u64>,
    /// By the first address of each page that something is behind.
    mapped: BTreeMap<u64, Page>,
    /// The blocks of each page that have been written.
    pages: BTreeMap<Page, BTreeMap<u64, Box<[u8]>>>,
    /// Those that RDMA devices may reach.
    shared: BTreeSet<Page>,
    next_address: u64,
    next_page: u64,
}

impl Memory {
    pub(super) fn new(pages_max: usize) -> Self {
        Self {
            pages_max,
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pages: BTreeMap::new(),
            shared: BTreeSet::new(),
            next_address: FIRST_ADDRESS,
            next_page: 0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pages_max as u64 * PAGE_BYTES
    }

    pub(super) fn free_bytes(&self) -> u64 {
        (self.pages_max - self.pages.len()) as u64 * PAGE_BYTES
    }

    /// What has not been given back, in words; empty if nothing.
    pub(super) fn leaks(&self) -> Vec<String> {
        let counts = [("reservations", self.reserved.len()), ("pages", self.pages.len()), ("maps", self.mapped.len())];
        counts.into_iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}")).collect()
    }

    pub(super) fn reserve(&mut self, bytes: u64) -> Address {
        assert!(
            bytes > 0 && bytes.is_multiple_of(PAGE_BYTES),
            "addresses are reserved in whole pages, not {bytes} bytes"
        );
        let at = self.next_address;
        self.reserved.insert(at, bytes);
        // Nothing is behind the last byte.
        self.next_address += bytes + PAGE_BYTES;
        Address(at)
    }

    pub(super) fn release(&mut self, at: Address, bytes: u64) {
        assert_eq!(self.reserved.remove(&at.0), Some(bytes), "addresses are released as they were reserved");
        let is_empty = self.mapped.range(at.0..at.0 + bytes).next().is_none();
        assert!(is_empty, "addresses are released when nothing is mapped there");
    }

    pub(super) fn create_page(&mut self) -> Option<Page> {
        let has_room = self.pages.len() < self.pages_max;
        has_room.then(|| {
            let page = Page(self.next_page);
            self.next_page += 1;
            self.pages.insert(page, BTreeMap::new());
            page
        })
    }

    pub(super) fn share_page(&mut self, page: Page) {
        self.shared.insert(page);
    }

    pub(super) fn destroy_page(&mut self, page: Page) {
        self.shared.remove(&page);
        assert!(!self.mapped.values().any(|mapped| *mapped == page), "a page is given back when it is not mapped");
        assert!(self.pages.remove(&page).is_some(), "a page is given back once");
    }

    pub(super) fn map(&mut self, at: Address, pages: &[Page]) {
        let range = at.0..at.0 + pages.len() as u64 * PAGE_BYTES;
        assert!(self.is_reserved(&range), "pages are mapped at reserved addresses");
        for (address, page) in range.step_by(PAGE_BYTES as usize).zip(pages) {
            assert!(self.pages.contains_key(page), "only pages that there are can be mapped");
            assert!(!self.mapped.values().any(|mapped| mapped == page), "a page is mapped at one address at most");
            assert!(self.mapped.insert(address, *page).is_none(), "one page is mapped at an address at most");
        }
    }

    pub(super) fn unmap(&mut self, range: Range<u64>) {
        for address in range.step_by(PAGE_BYTES as usize) {
            assert!(self.mapped.remove(&address).is_some(), "only what is mapped can be unmapped");
        }
    }

    fn is_reserved(&self, range: &Range<u64>) -> bool {
        let below = self.reserved.range(..=range.start).next_back();
        range.start.is_multiple_of(PAGE_BYTES) && below.is_some_and(|(at, bytes)| range.end <= at + bytes)
    }

    /// Whether there is a page behind each of these addresses.
    pub(super) fn is_mapped(&self, range: &Range<u64>) -> bool {
        let first = range.start / PAGE_BYTES * PAGE_BYTES;
        (first..range.end).step_by(PAGE_BYTES as usize).all(|page| self.mapped.contains_key(&page))
    }

    /// Whether RDMA devices may reach all of these addresses.
    pub(super) fn is_shared(&self, range: &Range<u64>) -> bool {
        let first = range.start / PAGE_BYTES * PAGE_BYTES;
        let is_shared = |page| self.mapped.get(&page).is_some_and(|page| self.shared.contains(page));
        (first..range.end).step_by(PAGE_BYTES as usize).all(is_shared)
    }

    /// From here on, so many bytes have pages behind them.
    pub(super) fn mapped_from(&self, at: Address) -> u64 {
        let pages = (at.0..).step_by(PAGE_BYTES as usize).take_while(|page| self.mapped.contains_key(page));
        pages.count() as u64 * PAGE_BYTES
    }

    /// How many of these bytes there are up to the last one that has been written, in whole blocks.
    pub(super) fn written(&self, at: Address, bytes: u64) -> u64 {
        let pages = (at.0..at.0 + bytes).step_by(PAGE_BYTES as usize);
        let last = |page: u64| {
            self.pages[&self.mapped[&page]].keys().next_back().map(|block| page + (block + 1) * BLOCK_BYTES)
        };
        pages.filter_map(last).max().map_or(0, |end| end - at.0)
    }

    pub(super) fn read(&self, at: Address, into: &mut [u8]) {
        for (page, block, within, part) in parts(at, into.len()) {
            let blocks = &self.pages[self.page(page)];
            match blocks.get(&block) {
                Some(bytes) => into[part.clone()].copy_from_slice(&bytes[within..within + part.len()]),
                None => into[part].fill(GARBAGE),
            }
        }
    }

    pub(super) fn write(&mut self, at: Address, from: &[u8]) {
        for (page, block, within, part) in parts(at, from.len()) {
            let page = *self.page(page);
            let blocks = self.pages.get_mut(&page).expect("mapped pages are there");
            let bytes = blocks.entry(block).or_insert_with(|| vec![GARBAGE; BLOCK_BYTES as usize].into());
            bytes[within..within + part.len()].copy_from_slice(&from[part]);
        }
    }

    fn page(&self, address: u64) -> &Page {
        self.mapped.get(&address).expect("work reaches only what is mapped")
    }
}

/// Each block that these bytes lie in: its page's address, its index there, the first byte in it, and which bytes they
/// are.
fn parts(at: Address, bytes: usize) -> impl Iterator<Item = (u64, u64, usize, Range<usize>)> {
    let end = at.0 + bytes as u64;
    let first = at.0 / BLOCK_BYTES * BLOCK_BYTES;
    (first..end).step_by(BLOCK_BYTES as usize).map(move |block| {
        let (from, to) = (block.max(at.0), (block + BLOCK_BYTES).min(end));
        let page = block / PAGE_BYTES * PAGE_BYTES;
        let part = (from - at.0) as usize..(to - at.0) as usize;
        (page, (block - page) / BLOCK_BYTES, (from - block) as usize, part)
    })
}
