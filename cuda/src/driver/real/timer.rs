//! How long the GPU takes for something, whatever it costs the host to ask for it: small kernels are faster than the
//! calls that launch them. So what is measured is captured, some of it in a row, and launched at once. That shows, too,
//! that it can be captured, without which it is of no use.

use std::sync::Arc;

use proto::Span;

use super::context::{Context, Mark, Queue};
use crate::DriverError;

/// Runs between two marks: enough that the marks' half microsecond does not count.
const RUNS: i64 = 8;
/// The best of so many times: a clock that is not up yet only makes it slower.
const ROUNDS: usize = 2;

/// Measures on one stream.
#[derive(Debug)]
pub(super) struct Timer {
    from: Mark,
    to: Mark,
}

impl Timer {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        Ok(Self { from: Mark::new(context, true)?, to: Mark::new(context, true)? })
    }

    /// How long it takes once its kernels are loaded.
    pub(super) fn time(
        &self,
        queue: &Queue,
        mut run: impl FnMut() -> Result<(), DriverError>,
    ) -> Result<Span, DriverError> {
        // Kernels are loaded when they are first launched, which cannot be captured.
        run()?;
        queue.synchronize()?;
        queue.begin_capture()?;
        let put = (0..RUNS).try_for_each(|_| run());
        let recording = queue.end_capture();
        put?;
        let recording = recording?;
        let mut best = Span::ENDLESS;
        for _ in 0..ROUNDS {
            self.from.record(queue)?;
            recording.launch(queue)?;
            self.to.record(queue)?;
            self.to.synchronize()?;
            best = best.min(self.from.until(&self.to)?);
        }
        Ok(Span::from_nanos(best.as_nanos() / RUNS))
    }
}
