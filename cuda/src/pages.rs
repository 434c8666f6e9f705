//! The pages of a GPU's memory that weights are put in (Clockwork, section 4.2). All are made at the start, so a load
//! never asks the driver for memory; which ones a model gets does not matter, as its addresses are its own.

use std::sync::Arc;

use crate::driver::{Driver, DriverError, Page};

/// All pages of weights.
#[derive(Debug)]
pub(crate) struct Pool {
    driver: Arc<dyn Driver>,
    all: u32,
    free: Vec<Page>,
}

impl Pool {
    /// Makes so many pages, or none.
    pub(crate) fn new(driver: &Arc<dyn Driver>, pages: u32) -> Result<Self, DriverError> {
        let mut pool = Self { driver: Arc::clone(driver), all: 0, free: Vec::new() };
        for _ in 0..pages {
            pool.free.push(driver.create_page()?);
            pool.all += 1;
        }
        Ok(pool)
    }

    /// All there are.
    pub(crate) fn all(&self) -> u32 {
        self.all
    }

    /// Those that nothing is in.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// So many of them, if there are.
    pub(crate) fn take(&mut self, pages: usize) -> Option<Vec<Page>> {
        let kept = self.free.len().checked_sub(pages)?;
        Some(self.free.split_off(kept))
    }

    /// They are free again.
    ///
    /// # Panics
    /// If more come back than there are.
    pub(crate) fn put(&mut self, pages: Vec<Page>) {
        self.free.extend(pages);
        assert!(self.free.len() <= self.all as usize, "pages that the pool never had");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.free.drain(..).for_each(|page| self.driver.destroy_page(page));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::Fake;

    proptest! {
        /// Against sets of pages: none is dealt twice, and whatever order they come back in, all do.
        #[test]
        fn each_page_is_somebodys_or_free(
            all in 0u32..40,
            steps in proptest::collection::vec((any::<bool>(), 0usize..15), 0..60),
        ) {
            let fake = Fake::new(40, 0);
            let driver: Arc<dyn Driver> = fake.clone();
            let mut pool = Pool::new(&driver, all).unwrap();
            prop_assert_eq!(fake.device().unwrap().free_bytes, u64::from(40 - all) * proto::weights::PAGE_BYTES);
            let mut held: Vec<BTreeSet<Page>> = Vec::new();
            for (takes, number) in steps {
                let used = held.iter().map(BTreeSet::len).sum::<usize>();
                prop_assert_eq!((pool.all(), pool.free()), (all, all as usize - used));
                if takes {
                    let pages = pool.take(number);
                    prop_assert_eq!(pages.is_some(), number <= all as usize - used);
                    let pages = pages.unwrap_or_default();
                    let new = pages.iter().copied().collect::<BTreeSet<_>>();
                    prop_assert_eq!(new.len(), pages.len());
                    prop_assert!(held.iter().all(|held| held.is_disjoint(&new)));
                    held.push(new);
                } else if !held.is_empty() {
                    let pages = held.swap_remove(number % held.len());
                    pool.put(pages.into_iter().collect());
                }
            }
            held.into_iter().for_each(|pages| pool.put(pages.into_iter().collect()));
            let everything = pool.take(all as usize).unwrap();
            prop_assert_eq!(everything.iter().collect::<BTreeSet<_>>().len(), all as usize);
            pool.put(everything);
            drop(pool);
            prop_assert_eq!(fake.leaks(), Vec::<String>::new());
        }
    }

    #[test]
    fn a_pool_that_cannot_be_made_leaves_nothing() {
        let fake = Fake::new(5, 0);
        let driver: Arc<dyn Driver> = fake.clone();
        assert!(Pool::new(&driver, 6).is_err());
        assert_eq!(fake.leaks(), Vec::<String>::new());
    }
}
