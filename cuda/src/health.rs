//! How this host's GPUs are, as NVIDIA's management library tells it. Nothing is changed, and no GPU is opened: it can
//! be asked while others use them.

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{Clock, ComputeMode, EccCounter, MemoryError, TemperatureSensor},
};

/// What holds clocks back, and is no choice of anybody's.
const SLOW: [(ThrottleReasons, &str); 5] = [
    (ThrottleReasons::SW_POWER_CAP, "the power limit"),
    (ThrottleReasons::HW_SLOWDOWN, "the hardware's slowdown"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (hardware)"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power brake"),
];

/// This host's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The driver's version, such as 580.95.05.
    pub driver: String,
    /// In NVML's order, which is that of the PCI bus.
    pub gpus: Vec<GpuHealth>,
}

/// One of them. What it does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuHealth {
    /// As NVIDIA calls it.
    pub name: String,
    /// `GPU-...`.
    pub uuid: String,
    /// `domain:bus:device.function`, in small letters.
    pub pci: String,
    /// Bytes of its memory, and of it in use.
    pub memory_bytes: Option<(u64, u64)>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Clock of its multiprocessors now, and the highest, in MHz.
    pub clock_mhz: Option<(u32, u32)>,
    /// What holds clocks back now.
    pub held_back_by: Vec<&'static str>,
    /// Errors of its memory since the driver was loaded that could not be corrected.
    pub uncorrected_errors: Option<u64>,
    /// Whether the driver keeps it ready while nobody uses it.
    pub is_persistent: Option<bool>,
    /// Whether one process alone may use it.
    pub is_exclusive: Option<bool>,
    /// Whether it is split into instances.
    pub is_split: Option<bool>,
}

/// Asks how this host's GPUs are.
///
/// # Errors
/// If NVIDIA's management library is missing or does not answer, in one line.
pub fn health() -> Result<Health, String> {
    let nvml = Nvml::init().map_err(|error| format!("no NVML (libnvidia-ml.so.1): {error}"))?;
    let failed = |error| format!("NVML: {error}");
    let driver = nvml.sys_driver_version().map_err(failed)?;
    let count = nvml.device_count().map_err(failed)?;
    let gpus = (0..count).map(|index| nvml.device_by_index(index).and_then(|gpu| of(&gpu)));
    let gpus = gpus.collect::<Result<_, _>>().map_err(failed)?;
    Ok(Health { driver, gpus })
}

fn of(gpu: &Device<'_>) -> Result<GpuHealth, nvml_wrapper::error::NvmlError> {
    let clock = gpu.clock_info(Clock::SM).ok().zip(gpu.max_clock_info(Clock::SM).ok());
    let reasons = gpu.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    let errors = gpu.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok();
    let mode = gpu.compute_mode().ok();
    let pci = gpu.pci_info()?;
    Ok(GpuHealth {
        name: gpu.name()?,
        uuid: gpu.uuid()?,
        pci: format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device),
        memory_bytes: gpu.memory_info().ok().map(|memory| (memory.total, memory.used)),
        temperature_c: gpu.temperature(TemperatureSensor::Gpu).ok(),
        clock_mhz: clock,
        held_back_by: SLOW.into_iter().filter(|(bit, _)| reasons.contains(*bit)).map(|(_, text)| text).collect(),
        uncorrected_errors: errors,
        is_persistent: gpu.is_in_persistent_mode().ok(),
        is_exclusive: mode.map(|mode| mode == ComputeMode::ExclusiveProcess),
        is_split: gpu.mig_mode().ok().map(|mode| mode.current == 1),
    })
}

#[cfg(test)]
mod tests {
    /// Whatever this host is: it does not panic, and what it says is one line.
    #[test]
    fn a_host_without_gpus_is_told_in_one_line() {
        if let Err(reason) = super::health() {
            assert!(reason.contains("NVML") && !reason.contains('\n'), "{reason}");
        }
    }
}
