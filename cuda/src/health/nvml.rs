//! NVIDIA's management library.

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{Clock, ComputeMode, EccCounter, MemoryError, TemperatureSensor},
    error::NvmlError,
};

use super::{Brake, GpuHealth, Health};
use crate::{Library, driver::real::looked_in};

/// The file that is looked for; NVIDIA's driver brings it along.
pub(super) const FILE: &str = "libnvidia-ml.so.1";

impl Brake {
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
