//! What this host has to drive GPUs with, for people.

/// One of the shared libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// As people call it.
    pub name: &'static str,
    /// The file that is looked for.
    pub file: &'static str,
    /// Where it was found and which version it is, or else what is missing and where it was looked for.
    pub found: Result<String, String>,
}

/// What a GPU lets RDMA devices do with its memory, as its driver says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectAccess {
    /// Whether its memory can be handed over as a dma-buf (`cuMemGetHandleForAddressRange`, which libcuda has since
    /// version 11.7).
    pub dma_buf: bool,
    /// Whether RDMA devices can reach its memory by `nvidia-peermem`.
    pub rdma: bool,
    /// Whether pages that are mapped can be made so that either way is open for them, which ours are.
    pub mapped: bool,
}
