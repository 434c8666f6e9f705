//! How this host's GPUs are, as NVIDIA's management library tells it. Nothing is changed, and no GPU is opened: it can
//! be asked while others use them.

use std::fmt;

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{Clock, ComputeMode, EccCounter, MemoryError, TemperatureSensor},
    error::NvmlError,
};

use crate::driver::real::{Library, looked_in};

/// The file that is looked for; NVIDIA's driver brings it along.
const FILE: &str = "libnvidia-ml.so.1";

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

    /// NVML's bit.
    fn bit(self) -> ThrottleReasons {
        match self {
            Self::PowerLimit => ThrottleReasons::SW_POWER_CAP,
            Self::Hardware => ThrottleReasons::HW_SLOWDOWN,
            Self::Heat => ThrottleReasons::SW_THERMAL_SLOWDOWN,
            Self::HardwareHeat => ThrottleReasons::HW_THERMAL_SLOWDOWN,
            Self::PowerBrake => ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN,
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

/// NVIDIA's management library, opened. Any call may take milliseconds, and none returns while the driver hangs.
pub struct Management(Nvml);

impl Management {
    /// Opens it.
    ///
    /// # Errors
    /// If it is missing or does not answer, in one line.
    pub fn open() -> Result<Self, String> {
        Nvml::init().map(Self).map_err(|error| format!("no NVML ({FILE}): {error}"))
    }

    /// How all GPUs of this host are.
    ///
    /// # Errors
    /// If one of them does not answer, in one line.
    pub fn all(&self) -> Result<Health, String> {
        let driver = self.0.sys_driver_version().map_err(failed)?;
        let count = self.0.device_count().map_err(failed)?;
        let gpus = (0..count).map(|index| self.0.device_by_index(index).and_then(|gpu| of(&gpu)));
        let gpus = gpus.collect::<Result<_, _>>().map_err(failed)?;
        Ok(Health { driver, gpus })
    }

    /// How one of them is, by its place on the PCI bus. Of an instance of a split GPU: how that GPU is.
    ///
    /// # Errors
    /// If there is none, or it does not answer, in one line.
    pub fn at(&self, pci: &str) -> Result<GpuHealth, String> {
        self.0.device_by_pci_bus_id(pci).and_then(|gpu| of(&gpu)).map_err(failed)
    }
}

fn failed(error: NvmlError) -> String {
    format!("NVML: {error}")
}

/// Asks how this host's GPUs are.
///
/// # Errors
/// If NVIDIA's management library is missing or does not answer, in one line.
pub fn health() -> Result<Health, String> {
    Management::open()?.all()
}

/// The management library, as the other ones are told of.
#[must_use]
pub fn library() -> Library {
    let found = match Nvml::init() {
        Err(NvmlError::LibloadingError(_)) => Err(format!("no NVML: looked for {FILE} in {}", looked_in())),
        // It is there, whatever it says of the driver.
        Ok(_) | Err(_) => Ok(FILE.to_owned()),
    };
    Library { name: "NVML", file: FILE, found }
}

fn of(gpu: &Device<'_>) -> Result<GpuHealth, NvmlError> {
    let clock = |of: Clock| gpu.clock_info(of).ok().zip(gpu.max_clock_info(of).ok());
    let errors = |kind| gpu.total_ecc_errors(kind, EccCounter::Volatile).ok();
    let held_back_by =
        |bits: ThrottleReasons| Brake::ALL.into_iter().filter(|brake| bits.contains(brake.bit())).collect();
    let mode = gpu.compute_mode().ok();
    let pci = gpu.pci_info()?;
    Ok(GpuHealth {
        name: gpu.name()?,
        uuid: gpu.uuid()?,
        pci: format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device),
        memory_bytes: gpu.memory_info().ok().map(|memory| (memory.total, memory.used)),
        utilization_percent: gpu.utilization_rates().ok().map(|rates| rates.gpu),
        temperature_c: gpu.temperature(TemperatureSensor::Gpu).ok(),
        clock_mhz: clock(Clock::SM),
        memory_clock_mhz: clock(Clock::Memory),
        power_mw: gpu.power_usage().ok(),
        power_limit_mw: gpu.enforced_power_limit().ok(),
        energy_mj: gpu.total_energy_consumption().ok(),
        held_back_by: gpu.current_throttle_reasons().ok().map(held_back_by),
        corrected_errors: errors(MemoryError::Corrected),
        uncorrected_errors: errors(MemoryError::Uncorrected),
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
            assert!(super::library().found.is_ok_and(|file| file == super::FILE) || reason.contains(super::FILE));
        }
    }
}
