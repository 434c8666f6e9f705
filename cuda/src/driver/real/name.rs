//! How an operator names a GPU.

use std::{fmt, str::FromStr};

use crate::{DriverError, driver::Device};

/// A GPU of this host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum GpuName {
    /// By its place among those that CUDA shows, which `CUDA_VISIBLE_DEVICES` changes.
    Index(usize),
    /// By its UUID (`GPU-...`, or `MIG-...` for an instance), or the beginning of it.
    Uuid(String),
}

impl GpuName {
    /// Which of these it is.
    ///
    /// # Errors
    /// If it is none of them, or several.
    pub fn find(&self, devices: &[Device]) -> Result<usize, DriverError> {
        let matching: Vec<usize> = match self {
            Self::Index(index) => (0..devices.len()).filter(|i| i == index).collect(),
            Self::Uuid(uuid) => {
                let is_it = |device: &Device| device.uuid.to_ascii_lowercase().starts_with(&uuid.to_ascii_lowercase());
                (0..devices.len()).filter(|&i| is_it(&devices[i])).collect()
            }
        };
        match matching[..] {
            [index] => Ok(index),
            [] => {
                let all: Vec<String> =
                    devices.iter().enumerate().map(|(i, device)| format!("{i} = {}", device.uuid)).collect();
                Err(DriverError(format!("no GPU {self}: name one of {}", all.join(", "))))
            }
            _ => Err(DriverError(format!("several GPUs are named {self}: give more of the UUID"))),
        }
    }
}

impl FromStr for GpuName {
    type Err = DriverError;

    fn from_str(text: &str) -> Result<Self, DriverError> {
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        match digits {
            Some(digits) if !digits.is_empty() && digits.chars().all(|c| c.is_ascii_hexdigit() || c == '-') => {
                Ok(Self::Uuid(text.to_owned()))
            }
            _ => Err(DriverError(format!("{text:?} names no GPU: give its index, GPU-<uuid> or MIG-<uuid>"))),
        }
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str) -> Device {
        Device {
            name: "NVIDIA H200".to_owned(),
            uuid: uuid.to_owned(),
            pci: "0000:01:00.0".to_owned(),
            memory_bytes: 1 << 37,
            free_bytes: 1 << 37,
            compute_capability: (9, 0),
        }
    }

    #[test]
    fn names_are_indexes_or_uuids() {
        assert_eq!("3".parse(), Ok(GpuName::Index(3)));
        assert_eq!("GPU-8a5f".parse(), Ok(GpuName::Uuid("GPU-8a5f".to_owned())));
        assert_eq!("MIG-8a5f-11".parse(), Ok(GpuName::Uuid("MIG-8a5f-11".to_owned())));
        for wrong in ["", "-1", "GPU-", "GPU-xyz", "8a5f-11", "gpu0"] {
            assert!(wrong.parse::<GpuName>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_name_fits_one_device() {
        let devices = [device("GPU-8a5f00"), device("GPU-8a5f11"), device("MIG-77")];
        let find = |name: &str| name.parse::<GpuName>().and_then(|name| name.find(&devices));
        assert_eq!(find("1"), Ok(1));
        assert_eq!(find("GPU-8A5F11"), Ok(1));
        assert_eq!(find("MIG-7"), Ok(2));
        assert_eq!(find("GPU-8a").unwrap_err().0, "several GPUs are named GPU-8a: give more of the UUID");
        let all = "no GPU 3: name one of 0 = GPU-8a5f00, 1 = GPU-8a5f11, 2 = MIG-77";
        assert_eq!(find("3").unwrap_err().0, all);
        assert!(find("GPU-77").is_err());
    }
}
