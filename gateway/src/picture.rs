//! What JPEG and PNG files hold, as eight bits a channel.
//!
//! A file's head says what it becomes, so that a caller can charge for it before anything is decoded. Limits hold
//! for what a head says and for what decoders take.

use std::io::Cursor;

use png::{BitDepth, Decoder, Limits, Transformations};
use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};
use zune_jpeg::{JpegDecoder, errors::DecodeErrors};

/// The longer side of a picture.
const SIDE_MAX: usize = 16_384;
/// Memory that a decoder may take: about 20 megapixels of RGB.
const DECODED_BYTES_MAX: usize = 64 << 20;
/// Pixels that the scans of a JPEG may go over in all: as many as 16 scans of the largest picture, where encoders write
/// 6 to 12. A decoder goes over some 5,000 million a second, however few bytes a scan has.
const SCANNED_PIXELS_MAX: usize = 16 * DECODED_BYTES_MAX;
/// What a scan costs in any case, in pixels.
const SCAN_PIXELS_MIN: usize = 4096;

type Jpeg<'a> = JpegDecoder<ZCursor<&'a [u8]>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Jpeg,
    Png,
}

/// What a file becomes once decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    format: Format,
    /// Bytes of its pixels, as decoders give them.
    pub(crate) decoded_bytes: usize,
}

/// Pixels row by row, the channels of a pixel side by side: gray, or red, green and blue; then alpha, if any.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) width: u32,
    pub(crate) height: u32,
    channels: usize,
    pixels: Vec<u8>,
}

impl Picture {
    /// One byte a pixel: the luminance, as BT.709 weighs the colours.
    pub(crate) fn into_gray(self) -> Vec<u8> {
        match self.channels {
            1 => self.pixels,
            2 => self.pixels.as_chunks::<2>().0.iter().map(|&[gray, _]| gray).collect(),
            channels => {
                self.pixels.chunks_exact(channels).map(|pixel| luminance(pixel[0], pixel[1], pixel[2])).collect()
            }
        }
    }

    /// Three bytes a pixel.
    pub(crate) fn into_rgb(self) -> Vec<u8> {
        match self.channels {
            3 => self.pixels,
            4 => self.pixels.as_chunks::<4>().0.iter().flat_map(|&[r, g, b, _]| [r, g, b]).collect(),
            channels => self.pixels.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect(),
        }
    }
}

fn luminance(red: u8, green: u8, blue: u8) -> u8 {
    ((2126 * u32::from(red) + 7152 * u32::from(green) + 722 * u32::from(blue)) / 10_000) as u8
}

/// Reads a file's head.
///
/// # Errors
/// If it is no picture, or one beyond the limits, in one line.
pub(crate) fn head(file: &[u8]) -> Result<Head, String> {
    let (format, width, height, decoded_bytes) = if file.starts_with(b"\xff\xd8\xff") {
        let (decoder, channels) = jpeg(file).map_err(|error| one_line(&error))?;
        let (width, height) = decoder.dimensions().unwrap_or_default();
        (Format::Jpeg, width, height, Some(width * height * channels))
    } else if file.starts_with(b"\x89PNG\r\n\x1a\n") {
        // Up to the pixels: whether there is an alpha channel may stand between.
        let reader = png(file).read_info().map_err(|error| one_line(&error))?;
        let (width, height) = reader.info().size();
        (Format::Png, width as usize, height as usize, reader.output_buffer_size())
    } else {
        return Err("it is neither JPEG nor PNG".into());
    };
    if width > SIDE_MAX || height > SIDE_MAX {
        return Err(format!("found {width} x {height} pixels, the limit is {SIDE_MAX} a side"));
    }
    let Some(decoded_bytes) = decoded_bytes.filter(|&bytes| bytes <= DECODED_BYTES_MAX) else {
        return Err(format!("found {width} x {height} pixels, the limit is {DECODED_BYTES_MAX} bytes once decoded"));
    };
    if format == Format::Jpeg {
        check_scans(file, width, height)?;
    }
    Ok(Head { format, decoded_bytes })
}

/// Decodes a file whose head is known.
///
/// # Errors
/// If the file is not as its head says, in one line.
pub(crate) fn decode(file: &[u8], head: &Head) -> Result<Picture, String> {
    match head.format {
        Format::Jpeg => decode_jpeg(file).map_err(|error| one_line(&error)),
        Format::Png => decode_png(file).map_err(|error| one_line(&error)),
    }
}

fn one_line(error: &impl std::fmt::Display) -> String {
    error.to_string().replace('\n', "; ")
}

/// A decoder that has read the head, and the channels that it gives: one for gray pictures, otherwise three.
fn jpeg(file: &[u8]) -> Result<(Jpeg<'_>, usize), DecodeErrors> {
    let options = DecoderOptions::default().set_strict_mode(false).set_max_width(SIDE_MAX).set_max_height(SIDE_MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers()?;
    let is_gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
    let space = if is_gray { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    Ok((decoder, space.num_components()))
}

fn decode_jpeg(file: &[u8]) -> Result<Picture, DecodeErrors> {
    let (mut decoder, channels) = jpeg(file)?;
    let pixels = decoder.decode()?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    Ok(Picture { width: width as u32, height: height as u32, channels, pixels })
}

fn png(file: &[u8]) -> Decoder<Cursor<&[u8]>> {
    let mut decoder = Decoder::new_with_limits(Cursor::new(file), Limits { bytes: DECODED_BYTES_MAX });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::EXPAND);
    decoder
}

fn decode_png(file: &[u8]) -> Result<Picture, png::DecodingError> {
    let mut reader = png(file).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().ok_or(png::DecodingError::LimitsExceeded)?];
    let frame = reader.next_frame(&mut pixels)?;
    pixels.truncate(frame.buffer_size());
    if frame.bit_depth == BitDepth::Sixteen {
        let byte = |sample: &[u8; 2]| ((u32::from(u16::from_be_bytes(*sample)) + 128) / 257) as u8;
        pixels = pixels.as_chunks().0.iter().map(byte).collect();
    }
    Ok(Picture { width: frame.width, height: frame.height, channels: frame.color_type.samples(), pixels })
}

/// Checks how much there is to go over: each scan of a progressive JPEG refines all of its pixels, and may be a few
/// bytes that refine nothing.
fn check_scans(file: &[u8], width: usize, height: usize) -> Result<(), String> {
    let (found, max) = (scans_of(file), SCANNED_PIXELS_MAX / (width * height).max(SCAN_PIXELS_MIN));
    if found > max {
        return Err(format!("found {found} scans of {width} x {height} pixels, expected at most {max} of that size"));
    }
    Ok(())
}

/// At least as many scans as any decoder finds in a JPEG: wherever the head of one may be (ITU-T T.81, section B.2.3),
/// in whatever segment. Coded data has none, as a zero follows each of its 0xFF (section F.1.2.3).
fn scans_of(file: &[u8]) -> usize {
    let is_scan = |bytes: &&[u8]| matches!(**bytes, [0xff, 0xda, 0, length, of @ 1..=4] if length == 6 + 2 * of);
    file.windows(5).filter(is_scan).count()
}

/// A PNG of these samples, eight bits each.
#[cfg(test)]
pub(crate) fn png_of(width: u32, height: u32, color: png::ColorType, samples: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(color);
    encoder.set_depth(BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(samples).unwrap();
    file
}

#[cfg(test)]
pub(crate) mod tests {
    use png::ColorType;

    use super::*;

    macro_rules! pictures {
        ($($name:literal)*) => {
            [$(($name, &include_bytes!(concat!("../tests/pictures/", $name))[..],
                &include_bytes!(concat!("../tests/pictures/", $name, ".rgb"))[..])),*]
        };
    }

    pub(crate) const JPEG: &[u8] = include_bytes!("../tests/pictures/half-chroma.jpg");

    /// An independent encoder's files, and what its decoder makes of them.
    #[test]
    fn pictures_have_the_pixels_that_another_decoder_finds() {
        let files = pictures![
            "bits.png" "gray.png" "gray16.png" "gray-alpha.png" "palette.png" "palette-transparent.png"
            "gray-transparent.png" "rgb-transparent.png" "rgb.png" "rgba.png"
            "gray.jpg" "full-chroma.jpg" "half-chroma.jpg" "progressive.jpg"
        ];
        for (name, file, right) in files {
            let head = head(file).unwrap();
            let picture = decode(file, &head).unwrap();
            assert_eq!((picture.width, picture.height), (9, 7), "{name}");
            let bytes = if name == "gray16.png" { 2 } else { 1 };
            assert_eq!(bytes * picture.pixels.len(), head.decoded_bytes, "{name}");
            // Decoders of JPEG may round otherwise, and interpolate chroma otherwise.
            let bound = if name == "half-chroma.jpg" { 12 } else { 2 * u8::from(name.ends_with("jpg")) };
            for (at, (found, right)) in picture.into_rgb().iter().zip(right).enumerate() {
                assert!(found.abs_diff(*right) <= bound, "{name}: byte {at} is {found}, expected {right}");
            }
        }
    }

    #[test]
    fn colours_have_the_luminance_of_bt_709_and_gray_is_itself() {
        let of = |channels, pixels: &[u8]| Picture { width: 1, height: 1, channels, pixels: pixels.into() }.into_gray();
        let expected = [(255, 0, 0, 54), (0, 255, 0, 182), (0, 0, 255, 18), (255, 255, 255, 255), (0, 0, 0, 0)];
        for (red, green, blue, gray) in expected {
            assert_eq!(of(3, &[red, green, blue]), [gray]);
            assert_eq!(of(4, &[red, green, blue, 9]), [gray]);
        }
        assert_eq!((of(1, &[77]), of(2, &[77, 3])), (vec![77], vec![77]));
    }

    #[test]
    fn the_head_says_what_a_picture_becomes() {
        let png = png_of(1000, 500, ColorType::Rgb, &[0; 1_500_000]);
        assert_eq!(head(&png).unwrap().decoded_bytes, 1_500_000);
        assert_eq!(head(&progressive(1000, 1)).unwrap().decoded_bytes, 1_000_000);
        assert_eq!(head(JPEG).unwrap().decoded_bytes, 9 * 7 * 3);
    }

    /// A progressive JPEG of one component whose coefficients are all zero, with so many scans.
    pub(crate) fn progressive(side: u16, scans: usize) -> Vec<u8> {
        let [high, low] = side.to_be_bytes();
        let table = |class: u8| [&[0xff, 0xc4, 0, 20, class, 1][..], &[0; 15], &[0]].concat();
        let mut jpeg = vec![0xff, 0xd8, 0xff, 0xdb, 0, 67, 0];
        jpeg.extend([1; 64]);
        jpeg.extend([0xff, 0xc2, 0, 11, 8, high, low, high, low, 1, 1, 0x11, 0]);
        jpeg.extend([table(0x00), table(0x10)].concat());
        let blocks = usize::from(side.div_ceil(8)).pow(2);
        // Each block is one bit: no difference, or the end of its band.
        let data = vec![0; blocks.div_ceil(8)];
        for scan in 0..scans {
            let band = if scan == 0 { [0, 0, 0] } else { [1, 63, 0] };
            jpeg.extend([&[0xff, 0xda, 0, 8, 1, 1, 0][..], &band, &data].concat());
        }
        jpeg.extend([0xff, 0xd9]);
        jpeg
    }

    #[test]
    fn the_scans_that_a_picture_may_have_follow_from_its_size() {
        // Encoders' ten scans of the largest pictures, and the most that small ones may have.
        assert_eq!(check_scans(&progressive(8, 12), 8192, 8192), Ok(()));
        assert_eq!(check_scans(&[], 0, 0), Ok(()));
        let max = SCANNED_PIXELS_MAX / SCAN_PIXELS_MIN;
        assert!(
            check_scans(&progressive(8, max), 1, 1).is_ok() && check_scans(&progressive(8, max + 1), 1, 1).is_err()
        );
    }

    #[test]
    fn scans_are_counted_wherever_they_may_be_and_nowhere_else() {
        let of_encoder = pictures!["gray.jpg" "full-chroma.jpg"];
        assert!(of_encoder.iter().all(|(_, file, _)| scans_of(file) == 1));
        let scan = [0xff, 0xda, 0, 8, 1];
        for (bytes, expected) in [
            (&[][..], 0),
            (&scan[..4], 0),
            (&scan, 1),
            (&[0xff, 0xff, 0xda, 0, 12, 3], 1),
            (&[0xff, 0xda, 0, 8, 3], 0),
            (&[0xff, 0xda, 0, 16, 5], 0),
            (&[0xff, 0, 0xda, 0, 8, 1], 0),
        ] {
            assert_eq!(scans_of(bytes), expected, "{bytes:?}");
        }
    }
}
