//! The invariant CRC (RoCEv2 annex A17.3.3): CRC-32 over the IP and UDP headers and the packet, with everything that
//! routers may change replaced by ones.
//!
//! It covers the IPv4 identification, which a UDP socket neither sets nor shows. Sending: the socket is set up so that
//! the kernel fills in what we assume. Receiving: a CRC is linear, so the difference between the CRC for an expected
//! identification and the one received, taken back over all bytes after the field, *is* the difference of the
//! identifications, if the packet is whole.

use std::{net::SocketAddr, sync::LazyLock};

use crc32fast::Hasher;

use super::{ICRC_BYTES, PACKET_BYTES_MAX, packet::field};

/// CRC-32 polynomial, reflected: bit 31 is the coefficient of x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// The polynomial 1.
const ONE: u32 = 0x8000_0000;
const UDP_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
/// Stands for the local routing header of InfiniBand.
const LRH_BYTES: usize = 8;
/// Bytes from the identification to the end of the UDP header.
const IDENTIFICATION_TO_BTH: usize = IPV4_BYTES - 4 + UDP_BYTES;
const DONT_FRAGMENT: u16 = 0x4000;
/// The kernel numbers the segments of one send 0, 1, 2, ..; at most this many.
pub const BATCH_SEGMENTS_MAX: usize = 128;

/// The addresses of a datagram and the parts of its IPv4 header that the ICRC covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Sender.
    pub source: SocketAddr,
    /// Receiver.
    pub destination: SocketAddr,
    /// IPv4 identification; IPv6 has none.
    pub identification: u16,
    /// IPv4 DF.
    pub dont_fragment: bool,
}

impl Path {
    /// As our own sockets send segment `segment` of a segmentation batch.
    #[must_use]
    pub const fn segment(source: SocketAddr, destination: SocketAddr, segment: u16) -> Self {
        Self { source, destination, identification: segment, dont_fragment: true }
    }
}

/// The ICRC of a packet without its last four bytes. On the wire it is little-endian.
#[must_use]
pub fn compute(path: &Path, covered: &[u8]) -> u32 {
    let headers = Headers::new(path.source, path.destination, path.dont_fragment, covered.len());
    headers.icrc(path.identification, covered)
}

/// The CRC of what comes before the BTH. The packets of a segmentation batch differ in nothing there but their
/// identification, which is 0 here: a CRC is linear, so another one changes the CRC in a known way.
#[derive(Debug)]
pub(crate) struct Headers {
    source: SocketAddr,
    destination: SocketAddr,
    covered_bytes: usize,
    crc: u32,
}

impl Headers {
    /// Of packets with so many bytes that are covered.
    pub(crate) fn new(source: SocketAddr, destination: SocketAddr, dont_fragment: bool, covered_bytes: usize) -> Self {
        let udp_bytes = (UDP_BYTES + covered_bytes + ICRC_BYTES) as u16;
        let mut bytes = [0xff_u8; LRH_BYTES + IPV6_BYTES + UDP_BYTES];
        let ip = &mut bytes[LRH_BYTES..];
        let ip_bytes = match (source, destination) {
            (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
                // Type of service (1), time to live (8) and checksum (10 .. 12) stay ones.
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&(IPV4_BYTES as u16 + udp_bytes).to_be_bytes());
                ip[4..6].fill(0);
                ip[6..8].copy_from_slice(&(u16::from(dont_fragment) * DONT_FRAGMENT).to_be_bytes());
                ip[9] = 17;
                ip[12..16].copy_from_slice(&source.ip().octets());
                ip[16..20].copy_from_slice(&destination.ip().octets());
                IPV4_BYTES
            }
            (source, destination) => {
                // Traffic class and flow label (0 .. 4, but for the version) and hop limit (7) stay ones.
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
                ip[6] = 17;
                ip[8..24].copy_from_slice(&octets_v6(source));
                ip[24..40].copy_from_slice(&octets_v6(destination));
                IPV6_BYTES
            }
        };
        let udp = &mut ip[ip_bytes..];
        udp[0..2].copy_from_slice(&source.port().to_be_bytes());
        udp[2..4].copy_from_slice(&destination.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
        let mut hasher = Hasher::new();
        hasher.update(&bytes[..LRH_BYTES + ip_bytes + UDP_BYTES]);
        Self { source, destination, covered_bytes, crc: hasher.finalize() }
    }

    /// As [`Self::new`], with DF, in the place of `last` unless those are the same. In place: copied just after they
    /// were written, they would stall the CPU for longer than all other work on a packet.
    pub(crate) fn after(
        last: &mut Option<Self>,
        source: SocketAddr,
        destination: SocketAddr,
        covered_bytes: usize,
    ) -> &Self {
        if last.as_ref().is_some_and(|last| !last.are_of(source, destination, covered_bytes)) {
            *last = None;
        }
        last.get_or_insert_with(|| Self::new(source, destination, true, covered_bytes))
    }

    fn are_of(&self, source: SocketAddr, destination: SocketAddr, covered_bytes: usize) -> bool {
        self.covered_bytes == covered_bytes && self.source == source && self.destination == destination
    }

    /// The ICRC of a packet with these headers.
    pub(crate) fn icrc(&self, identification: u16, covered: &[u8]) -> u32 {
        debug_assert_eq!(covered.len(), self.covered_bytes, "the headers tell the length");
        // The congestion byte counts as ones, so the register starts as if the difference had been taken back over the
        // bytes before it, too.
        let masked = MASKED[usize::from(covered[field::CONGESTION] ^ 0xff)];
        let mut hasher = Hasher::new_with_initial(self.crc ^ self.marked(identification) ^ masked);
        hasher.update(covered);
        hasher.finalize()
    }

    /// What an identification changes.
    fn marked(&self, identification: u16) -> u32 {
        if self.source.is_ipv6() {
            return 0;
        }
        MARKED.get(usize::from(identification)).copied().unwrap_or_else(|| mark(identification))
    }
}

/// What an identification changes of the CRC at the end of the UDP header, whose length from there is fixed.
const fn mark(identification: u16) -> u32 {
    multiply(POWER_TO_BTH, identification.swap_bytes() as u32)
}

/// `x^(8 n)` for the bytes from the identification to the end of the UDP header.
const POWER_TO_BTH: u32 = {
    let (mut power, mut bits) = (ONE, 0);
    while bits < 8 * IDENTIFICATION_TO_BTH {
        power = power >> 1 ^ POLYNOMIAL & (power & 1).wrapping_neg();
        bits += 1;
    }
    power
};

/// [`mark`] of the identifications that our own sockets use.
static MARKED: [u32; BATCH_SEGMENTS_MAX] = {
    let (mut marked, mut identification) = ([0; BATCH_SEGMENTS_MAX], 0);
    while identification < BATCH_SEGMENTS_MAX {
        marked[identification] = mark(identification as u16);
        identification += 1;
    }
    marked
};

/// What a difference in the congestion byte comes to before the bytes in front of it.
static MASKED: [u32; 256] = {
    let (mut masked, mut difference) = ([0; 256], 0);
    while difference < 256 {
        let (mut register, mut bits) = (difference as u32, 0);
        while bits < 8 * field::CONGESTION {
            register = divide_by_x(register);
            bits += 1;
        }
        masked[difference] = register;
        difference += 1;
    }
    masked
};

fn octets_v6(address: SocketAddr) -> [u8; 16] {
    match address {
        SocketAddr::V4(address) => address.ip().to_ipv6_mapped().octets(),
        SocketAddr::V6(address) => address.ip().octets(),
    }
}

/// Writes the ICRC of a packet that our own socket sends as segment `segment` of a segmentation batch.
#[cfg(feature = "udp")] // Only its faults change a packet that is written.
pub(crate) fn seal(source: SocketAddr, destination: SocketAddr, segment: u16, packet: &mut [u8]) {
    let (covered, icrc) = packet.split_at_mut(packet.len() - ICRC_BYTES);
    icrc.copy_from_slice(&compute(&Path::segment(source, destination, segment), covered).to_le_bytes());
}

/// Checks a received packet, without its last four bytes, against `icrc`, and finds out what the IPv4 header held.
/// `None` if it was damaged on the way.
#[must_use]
pub fn verify(
    source: SocketAddr,
    destination: SocketAddr,
    covered: &[u8],
    icrc: u32,
    accept: Identification,
) -> Option<Path> {
    Verifier::default().verify(source, destination, covered, icrc, accept)
}

/// Checks packets one after another. Those of a segmentation batch are alike, and numbered: what is known of one helps
/// with the next.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    /// Of the last packet,
    headers: Option<Headers>,
    /// and the identification after its own.
    next: u16,
}

impl Verifier {
    /// As [`verify`].
    pub(crate) fn verify(
        &mut self,
        source: SocketAddr,
        destination: SocketAddr,
        covered: &[u8],
        icrc: u32,
        accept: Identification,
    ) -> Option<Path> {
        if covered.len() > PACKET_BYTES_MAX - ICRC_BYTES {
            return None;
        }
        let alike = self.headers.as_ref().is_some_and(|last| last.are_of(source, destination, covered.len()));
        let expected = if alike { self.next } else { 0 };
        self.next = 0;
        let headers = Headers::after(&mut self.headers, source, destination, covered.len());
        let difference = headers.icrc(expected, covered) ^ icrc;
        let path = Path::segment(source, destination, 0);
        let found = if difference == 0 {
            Some(expected)
        } else if source.is_ipv6() {
            return None;
        } else {
            recover(covered.len(), difference).map(|change| expected ^ change)
        };
        let path = match (found, accept) {
            (Some(identification), Identification::Any) => Path { identification, ..path },
            (Some(identification), Identification::SegmentIndex)
                if usize::from(identification) < BATCH_SEGMENTS_MAX =>
            {
                Path { identification, ..path }
            }
            (_, Identification::SegmentIndex) => return None,
            (None, Identification::Any) => {
                let path = Path { dont_fragment: false, ..path };
                let identification = recover(covered.len(), compute(&path, covered) ^ icrc)?;
                Path { identification, ..path }
            }
        };
        if source.is_ipv4() {
            self.next = path.identification.wrapping_add(1);
        }
        Some(path)
    }
}

/// What must change in the identification for the CRC to change by `difference`; 16 bits of redundancy decide whether
/// that can be.
fn recover(covered_bytes: usize, difference: u32) -> Option<u16> {
    let register = multiply(BACKWARDS[IDENTIFICATION_TO_BTH + covered_bytes], difference);
    u16::try_from(register).ok().map(u16::swap_bytes)
}

/// `x^(-8 n)` for every n: multiplying a CRC register by it undoes n zero bytes.
static BACKWARDS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let one_byte = (0..8).fold(ONE, |power, _| divide_by_x(power));
    let powers = std::iter::successors(Some(ONE), |power| Some(multiply(*power, one_byte)));
    powers.take(IDENTIFICATION_TO_BTH + PACKET_BYTES_MAX).collect()
});

/// The polynomial's constant term is 1, so division by x is a shift after clearing ours.
const fn divide_by_x(a: u32) -> u32 {
    if a & ONE == 0 { a << 1 } else { (a ^ POLYNOMIAL) << 1 | 1 }
}

/// Product modulo the CRC polynomial.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let (mut product, mut bit) = (0, 32);
    while bit > 0 {
        bit -= 1;
        // Branch-free: which bits are set is random.
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = b >> 1 ^ POLYNOMIAL & (b & 1).wrapping_neg();
    }
    product
}

/// How a peer's kernel fills the IPv4 identification field, which the ICRC covers but a UDP socket does not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Identification {
    /// A socket set up as ours are: 0, or the packet's place in a segmentation batch (below 128), with DF. The ICRC
    /// check keeps 25 of its 32 bits. It sends from the very port that it receives at, so others are not accepted.
    #[default]
    SegmentIndex,
    /// Anything, DF or not, as kernels and network cards do, and from whichever port they like: it names a flow to
    /// switches. The ICRC check keeps 15 bits.
    Any,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::BTH_BYTES;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    /// A congestion notification of a ConnectX-4 Lx.
    #[test]
    fn agrees_with_a_network_card() {
        let covered = bytes(&("8100ffff4000011800000000".to_owned() + &"00".repeat(16)));
        let path = Path {
            source: "10.0.17.1:0".parse().unwrap(),
            destination: "10.0.18.1:4791".parse().unwrap(),
            identification: 0x718c,
            dont_fragment: true,
        };
        assert_eq!(compute(&path, &covered).to_le_bytes(), [0x82, 0xfd, 0x00, 0x2a]);
        let icrc = u32::from_le_bytes([0x82, 0xfd, 0x00, 0x2a]);
        assert_eq!(verify(path.source, path.destination, &covered, icrc, Identification::Any), Some(path));
        assert_eq!(verify(path.source, path.destination, &covered, icrc, Identification::SegmentIndex), None);
    }

    proptest! {
        #[test]
        fn recovers_what_the_socket_hides(
            mut covered in prop::collection::vec(any::<u8>(), BTH_BYTES..600),
            identification in any::<u16>(),
            dont_fragment in any::<bool>(),
            flip in any::<prop::sample::Index>(),
        ) {
            let path = Path {
                source: "127.0.0.1:4791".parse().unwrap(),
                destination: "127.9.8.7:4791".parse().unwrap(),
                identification,
                dont_fragment,
            };
            let icrc = compute(&path, &covered);
            let found = verify(path.source, path.destination, &covered, icrc, Identification::Any);
            // With DF assumed first, a packet without it passes for one with it once in 2^16.
            prop_assert!(found.is_some());
            if dont_fragment {
                prop_assert_eq!(found, Some(path));
                let strict = verify(path.source, path.destination, &covered, icrc, Identification::SegmentIndex);
                prop_assert_eq!(strict.is_some(), usize::from(identification) < BATCH_SEGMENTS_MAX);
            }
            // Any single damaged bit outside the masked byte is noticed by the strict check.
            let bit = flip.index(covered.len() * 8);
            if bit / 8 != field::CONGESTION && identification == 0 && dont_fragment {
                covered[bit / 8] ^= 1 << (bit % 8);
                let strict = verify(path.source, path.destination, &covered, icrc, Identification::SegmentIndex);
                prop_assert_eq!(strict, None);
            }
        }
    }

    /// The naive way: all headers and the packet in one piece.
    fn compute_naively(path: &Path, covered: &[u8]) -> u32 {
        let udp_bytes = (UDP_BYTES + covered.len() + ICRC_BYTES) as u16;
        let mut all = vec![0xff; LRH_BYTES];
        match (path.source, path.destination) {
            (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
                all.extend([0x45, 0xff]);
                all.extend((IPV4_BYTES as u16 + udp_bytes).to_be_bytes());
                all.extend(path.identification.to_be_bytes());
                all.extend([if path.dont_fragment { 0x40 } else { 0 }, 0, 0xff, 17, 0xff, 0xff]);
                all.extend(source.ip().octets());
                all.extend(destination.ip().octets());
            }
            (source, destination) => {
                all.extend([0x6f, 0xff, 0xff, 0xff]);
                all.extend(udp_bytes.to_be_bytes());
                all.extend([17, 0xff]);
                all.extend(octets_v6(source));
                all.extend(octets_v6(destination));
            }
        }
        all.extend(path.source.port().to_be_bytes());
        all.extend(path.destination.port().to_be_bytes());
        all.extend(udp_bytes.to_be_bytes());
        all.extend([0xff; 2]);
        all.extend(covered);
        all[LRH_BYTES + if path.source.is_ipv4() { IPV4_BYTES } else { IPV6_BYTES } + UDP_BYTES + field::CONGESTION] =
            0xff;
        crc32fast::hash(&all)
    }

    proptest! {
        #[test]
        fn computes_what_one_pass_over_everything_does(
            covered in prop::collection::vec(any::<u8>(), BTH_BYTES..5000),
            identification in prop_oneof![0..BATCH_SEGMENTS_MAX as u16, any::<u16>()],
            dont_fragment in any::<bool>(),
            ipv6 in any::<bool>(),
            ports in any::<[u16; 2]>(),
        ) {
            let hosts: [std::net::IpAddr; 2] = if ipv6 {
                ["fd00::1".parse().unwrap(), "fd00:1234::9".parse().unwrap()]
            } else {
                [[127, 0, 0, 1].into(), [10, 9, 200, 7].into()]
            };
            let [source, destination] = [0, 1].map(|end| SocketAddr::new(hosts[end], ports[end]));
            let path = Path { source, destination, identification, dont_fragment };
            prop_assert_eq!(compute(&path, &covered), compute_naively(&path, &covered));
        }

        /// What came before must not change what is found of a packet.
        #[test]
        fn a_verifier_forgets_nothing_and_invents_nothing(
            packets in prop::collection::vec(
                (0..3_usize, BTH_BYTES..BTH_BYTES + 3, 0..4_u16, prop::bool::weighted(0.1), any::<bool>()),
                1..40,
            ),
        ) {
            let sources: [SocketAddr; 3] =
                ["127.0.0.1:4791", "127.0.0.2:4791", "[fd00::1]:4791"].map(|address| address.parse().unwrap());
            let destinations: [SocketAddr; 3] =
                ["127.9.8.7:4791", "127.9.8.7:4791", "[fd00::2]:4791"].map(|address| address.parse().unwrap());
            let mut verifier = Verifier::default();
            for (number, (end, bytes, jump, damaged, any)) in packets.into_iter().enumerate() {
                let identification = number as u16 * jump;
                let covered: Vec<u8> = (0..bytes).map(|at| (at * 31 + number) as u8).collect();
                let (source, destination) = (sources[end], destinations[end]);
                let path = Path { source, destination, identification, dont_fragment: true };
                let icrc = compute(&path, &covered) ^ u32::from(damaged) << 7;
                let accept = if any { Identification::Any } else { Identification::SegmentIndex };
                let found = verifier.verify(source, destination, &covered, icrc, accept);
                prop_assert_eq!(found, verify(source, destination, &covered, icrc, accept));
            }
        }
    }

    /// The naive way: try every identification.
    fn search(path: Path, covered: &[u8], icrc: u32) -> Option<u16> {
        (0..=u16::MAX)
            .find(|identification| compute(&Path { identification: *identification, ..path }, covered) == icrc)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
        #[test]
        fn recovery_agrees_with_search(
            covered in prop::collection::vec(any::<u8>(), BTH_BYTES..80),
            identification in any::<u16>(),
            damage in prop::option::of(any::<u32>()),
        ) {
            let source = "127.0.0.1:4791".parse().unwrap();
            let path = Path { source, destination: source, identification, dont_fragment: true };
            let icrc = compute(&path, &covered) ^ damage.unwrap_or(0);
            let unmarked = Path { identification: 0, ..path };
            let found = recover(covered.len(), compute(&unmarked, &covered) ^ icrc);
            prop_assert_eq!(found, search(path, &covered, icrc));
        }
    }

    #[test]
    fn ipv6_is_checked_in_full() {
        let source = "[fd00::1]:4791".parse().unwrap();
        let destination = "[fd00::2]:4791".parse().unwrap();
        let covered = [7; 40];
        let icrc = compute(&Path::segment(source, destination, 0), &covered);
        assert!(verify(source, destination, &covered, icrc, Identification::Any).is_some());
        assert!(verify(source, destination, &covered, icrc ^ 1, Identification::Any).is_none());
    }
}
