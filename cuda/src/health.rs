//! How this host's GPUs are, as NVIDIA's management library tells it. Nothing is changed, and no GPU is opened: it can
//! be asked while others use them.

use std::fmt;

#[cfg(feature = "driver")]
pub(crate) mod nvml;
#[cfg(not(feature = "driver"))]
mod without;

#[cfg(feature = "driver")]
pub use nvml::Management;
#[cfg(not(feature = "driver"))]
pub use without::Management;

/// What holds clocks back, and is no choice of anybody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Brake {
    /// It would draw more power than it may.
    PowerLimit,
    /// The hardware halves clocks or worse, for heat or for power.
    Hardware,
    /// The driver keeps it from becoming too hot.
    Heat,
    /// The hardware does.
    HardwareHeat,
    /// The machine's power supply asked for it.
    PowerBrake,
}

impl Brake {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::PowerLimit, Self::Hardware, Self::Heat, Self::HardwareHeat, Self::PowerBrake];

    /// What metrics call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PowerLimit => "power_limit",
            Self::Hardware => "hardware",
            Self::Heat => "heat",
            Self::HardwareHeat => "hardware_heat",
            Self::PowerBrake => "power_brake",
        }
    }
}

impl fmt::Display for Brake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PowerLimit => "the power limit",
            Self::Hardware => "the hardware's slowdown",
            Self::Heat => "heat",
            Self::HardwareHeat => "heat (hardware)",
            Self::PowerBrake => "the power brake",
        })
    }
}

/// This host's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The driver's version, such as 580.95.05.
    pub driver: String,
    /// In NVML's order, which is that of the PCI bus.
    pub gpus: Vec<GpuHealth>,
}

/// One of them. What it does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuHealth {
    /// As NVIDIA calls it.
    pub name: String,
    /// `GPU-...`.
    pub uuid: String,
    /// `domain:bus:device.function`, in small letters.
    pub pci: String,
    /// Bytes of its memory, and of it in use.
    pub memory_bytes: Option<(u64, u64)>,
    /// Percent of the last while, a sixth of a second to a second, in which it computed something.
    pub utilization_percent: Option<u32>,
    /// Degrees Celsius.
    pub temperature_c: Option<u32>,
    /// Clock of its multiprocessors now, and the highest, in MHz.
    pub clock_mhz: Option<(u32, u32)>,
    /// The same of its memory.
    pub memory_clock_mhz: Option<(u32, u32)>,
    /// What it draws, in milliwatts.
    pub power_mw: Option<u32>,
    /// What it may draw at most, in milliwatts.
    pub power_limit_mw: Option<u32>,
    /// What it has drawn since the driver was loaded, in millijoules.
    pub energy_mj: Option<u64>,
    /// What holds clocks back now.
    pub held_back_by: Option<Vec<Brake>>,
    /// Errors of its memory since the driver was loaded that were corrected.
    pub corrected_errors: Option<u64>,
    /// And those that could not be.
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
    Management::open()?.all()
}

#[cfg(test)]
mod tests {
    /// Whatever this host is: it does not panic, and what it says is one line.
    #[test]
    fn a_host_without_gpus_is_told_in_one_line() {
        if let Err(reason) = super::health() {
            assert!(!reason.contains('\n'), "{reason}");
            #[cfg(not(feature = "driver"))]
            assert_eq!(reason, crate::WITHOUT_GPUS);
            #[cfg(feature = "driver")]
            {
                let is_missing = reason.contains("NVML") && reason.contains(super::nvml::FILE);
                assert!(is_missing || super::nvml::library().found.is_ok(), "{reason}");
            }
        }
    }
}
