//! GPUDirect: whether RDMA devices could read and write GPUs' memory without a way through the host's. Each piece is
//! asked for; none is concluded from a product's name.
//!
//! There are two ways, and each needs its pieces: a dma-buf (the GPU's driver hands its memory over as one, the RDMA
//! device's driver takes it), or `nvidia-peermem`, a kernel module between NVIDIA's drivers for both.

use cuda::DirectAccess;

use super::{host::Host, rdma::Device};
use crate::doctor::finding::Finding;

/// The module in all its names; the last one is that of before NVIDIA's driver had it.
const PEERMEM: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];
/// What drives RDMA devices that the module knows.
const PEERMEM_DRIVERS: [&str; 2] = ["mlx5_core", "mlx4_core"];

/// What GPUs and RDMA devices say.
#[derive(Debug, Clone)]
pub(super) struct Direct {
    /// GPUs by their addresses on the PCI bus, or why they cannot be asked.
    pub gpus: Result<Vec<(String, DirectAccess)>, String>,
    /// Whether an RDMA device takes dma-bufs, or why that is not known.
    pub takes_dma_bufs: fn(&str) -> Result<bool, String>,
}

impl Direct {
    /// This host's.
    pub(super) fn here() -> Self {
        let takes_dma_bufs = |device: &str| transport::takes_dma_bufs(device).map_err(|error| error.to_string());
        #[cfg(feature = "cuda")]
        let gpus = cuda::driver::real::direct_access().map_err(|error| error.to_string());
        #[cfg(not(feature = "cuda"))]
        let gpus = Err(cuda::WITHOUT_GPUS.to_owned());
        Self { gpus, takes_dma_bufs }
    }
}

/// One line for each GPU, of which NVML tells number and address, about all RDMA devices.
pub(super) fn check(host: &Host, direct: &Direct, gpus: &[&str], devices: &[Device]) -> Vec<Finding> {
    if devices.is_empty() {
        return Vec::new();
    }
    let nics: Vec<Nic> = devices.iter().map(|device| Nic::of(host, direct, device)).collect();
    let has_module = PEERMEM.iter().any(|module| host.has(&format!("/sys/module/{module}")));
    let about = |(number, pci): (usize, &&str)| {
        let subject = format!("GPUDirect of GPU {number}");
        let known = match &direct.gpus {
            Ok(known) => known.iter().find(|(at, _)| at.eq_ignore_ascii_case(pci)).map(|(_, access)| access),
            Err(_) => None,
        };
        let Some(access) = known else {
            let why = direct.gpus.as_ref().err().map_or("CUDA does not show this GPU", String::as_str);
            return Finding::ok(subject, format!("not known: {why}"));
        };
        let each: Vec<String> =
            nics.iter().map(|nic| format!("{} {}", nic.name, verdict(access, nic, has_module))).collect();
        Finding::ok(subject, format!("{} (a backend's key gpu_direct = true has inputs go that way)", each.join("; ")))
    };
    gpus.iter().enumerate().map(about).collect()
}

/// An RDMA device, as far as this matters.
struct Nic {
    name: String,
    /// The kernel driver of its PCI device; one without is software.
    driver: Option<String>,
    takes_dma_bufs: Result<bool, String>,
}

impl Nic {
    fn of(host: &Host, direct: &Direct, device: &Device) -> Self {
        let at = format!("/sys/class/infiniband/{}", device.name);
        // rdma_rxe has the device of the network interface below it, and says so by this file.
        let is_software = host.has(&format!("{at}/parent"));
        let driver = host.read(&format!("{at}/device/uevent")).filter(|_| !is_software);
        let driver =
            driver.and_then(|text| Some(text.lines().find_map(|line| line.strip_prefix("DRIVER="))?.to_owned()));
        let takes_dma_bufs = if driver.is_some() { (direct.takes_dma_bufs)(&device.name) } else { Ok(false) };
        Self { name: device.name.clone(), driver, takes_dma_bufs }
    }
}

/// Which way is open, or what is missing.
fn verdict(gpu: &DirectAccess, nic: &Nic, has_module: bool) -> String {
    let Some(driver) = &nic.driver else { return "is software: it has no way into a GPU".to_owned() };
    if !gpu.mapped {
        return "could not: the GPU opens no pages that are mapped, which ours are".to_owned();
    }
    let dma_buf = match &nic.takes_dma_bufs {
        Ok(true) if gpu.dma_buf => return "could, by dma-buf".to_owned(),
        _ if !gpu.dma_buf => "the GPU's driver hands out no dma-bufs (its open kernel modules do)".to_owned(),
        Ok(_) => format!("{driver} takes no dma-bufs here"),
        Err(reason) => format!("whether it takes dma-bufs is not known ({reason})"),
    };
    let module = if !PEERMEM_DRIVERS.contains(&driver.as_str()) {
        format!("nvidia-peermem does not know {driver}")
    } else if !gpu.rdma {
        "the GPU has no GPUDirect RDMA".to_owned()
    } else if has_module {
        return "could, by nvidia-peermem".to_owned();
    } else {
        "nvidia-peermem is not loaded".to_owned()
    };
    format!("could not: {dma_buf}, and {module}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: DirectAccess = DirectAccess { dma_buf: true, rdma: true, mapped: true };

    fn nic(driver: Option<&str>, takes_dma_bufs: Result<bool, &str>) -> Nic {
        let (driver, takes_dma_bufs) = (driver.map(str::to_owned), takes_dma_bufs.map_err(str::to_owned));
        Nic { name: "mlx5_0".into(), driver, takes_dma_bufs }
    }

    #[test]
    fn either_way_is_open_only_with_all_its_pieces() {
        let mlx5 = |takes| nic(Some("mlx5_core"), takes);
        let closed = DirectAccess { dma_buf: false, ..ALL };
        assert_eq!(verdict(&ALL, &mlx5(Ok(true)), false), "could, by dma-buf");
        assert_eq!(verdict(&closed, &mlx5(Ok(true)), true), "could, by nvidia-peermem");
        assert_eq!(verdict(&ALL, &mlx5(Ok(false)), true), "could, by nvidia-peermem");
        for (gpu, nic, has_module, missing) in [
            (ALL, mlx5(Ok(false)), false, ["mlx5_core takes no dma-bufs", "nvidia-peermem is not loaded"]),
            (closed, mlx5(Ok(true)), false, ["hands out no dma-bufs", "nvidia-peermem is not loaded"]),
            (ALL, nic(Some("bnxt_en"), Ok(false)), true, ["bnxt_en takes no", "does not know bnxt_en"]),
            (ALL, mlx5(Err("no libibverbs")), false, ["not known (no libibverbs)", "is not loaded"]),
            (DirectAccess { rdma: false, ..closed }, mlx5(Ok(true)), true, ["no dma-bufs", "has no GPUDirect RDMA"]),
            (DirectAccess { mapped: false, ..ALL }, mlx5(Ok(true)), true, ["could not", "pages that are mapped"]),
            (ALL, nic(None, Ok(true)), true, ["software", "no way"]),
        ] {
            let said = verdict(&gpu, &nic, has_module);
            assert!(missing.iter().all(|piece| said.contains(piece)), "{said}");
        }
    }
}
