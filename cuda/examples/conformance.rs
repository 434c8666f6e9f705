//! What must hold of every driver and of what is built on it (`cuda::conformance`), on a real GPU. Prints
//! `passed|failed NAME` for each case; the exit code is 1 if one failed, and 2 if there is no GPU.
//!
//! ```text
//! cargo run --release -p cuda --example conformance -- [GPU] [PART OF A NAME]
//! ```

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    sync::Arc,
};

use cuda::{
    Driver, DriverError,
    conformance::{Case, cases},
    driver::real::{Cuda, GpuName},
};

pub(crate) fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let gpu = arguments.next().unwrap_or_else(|| "0".to_owned());
    let part = arguments.next().unwrap_or_default();
    let open = || -> Result<Arc<dyn Driver>, DriverError> { Ok(Arc::new(Cuda::open(&gpu.parse::<GpuName>()?)?)) };
    let driver = match open() {
        Ok(driver) => driver,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let asked = cases().into_iter().filter(|case| case.name.contains(&part));
    let failed = asked.filter(|case| !passes(*case, &driver)).count();
    println!("{failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

fn passes(case: Case, driver: &Arc<dyn Driver>) -> bool {
    let result = catch_unwind(AssertUnwindSafe(|| (case.run)(driver)));
    let failure = match result {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => Some(failure.to_string()),
        Err(_) => Some("it panicked".to_owned()),
    };
    match &failure {
        None => println!("passed {}", case.name),
        Some(failure) => println!("failed {}: {failure}", case.name),
    }
    failure.is_none()
}
