//! Step 1: a picture becomes a model's input (Symphony, section 4.3: preprocessing at the frontend overlaps the wait
//! for the batch).
//!
//! Decoding is the pool's work. What a picture becomes is told by its head and charged to its client before any of it
//! is decoded. A picture that is truncated, hostile, or larger than the limits once decoded is an error of that request
//! alone.

use fast_image_resize::{
    FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer,
    images::{TypedImage, TypedImageRef},
    pixels::{U8, U8x3},
};
use frontend::{InferError, rope::Rope};
use repository::{Color, DataType, ImagePipeline, Layout, Tensor};

use crate::{
    budget::Charge,
    picture::{self, Picture},
    pool::Pool,
};

/// The tensor's bytes as they lie in a slot; they are charged too.
///
/// # Errors
/// If the picture cannot be used, or there is no room, or too many wait.
pub(crate) async fn decoded(
    pool: &Pool,
    charge: &Charge,
    pipeline: ImagePipeline,
    tensor: Tensor,
    picture: Rope,
) -> Result<Vec<u8>, InferError> {
    let held = charge.clone();
    let room = move |bytes| held.beside(bytes).map_err(|full| InferError::MemoryFull(format!("the picture: {full}")));
    charge.grow(tensor.bytes()).map_err(|full| InferError::MemoryFull(format!("the picture: {full}")))?;
    pool.run(charge, move || tensor_of(&pipeline, &tensor, &picture.joined(), room)).await?
}

/// Decodes, resizes, crops, normalises, and lays out. `room` is asked for what decoding takes up, in bytes, and what it
/// gives is kept until all is done.
///
/// # Errors
/// If the picture cannot be used, in one line, or there is no room.
pub fn tensor_of<R>(
    pipeline: &ImagePipeline,
    tensor: &Tensor,
    picture: &[u8],
    room: impl FnOnce(usize) -> Result<R, InferError>,
) -> Result<Vec<u8>, InferError> {
    let head = picture::head(picture).map_err(unusable)?;
    // What the picture becomes, and once more for what comes before (the coefficients of a progressive JPEG) or after
    // (other channels).
    let _room = room(2 * picture.len() + 2 * head.decoded_bytes)?;
    let decoded = picture::decode(picture, &head).map_err(unusable)?;
    let pixels = resize(pipeline, decoded).map_err(unusable)?;
    let channels = pipeline.color.channels();
    let (height, width) = (pipeline.height as usize, pipeline.width as usize);
    let place = |row: usize, column: usize, channel: usize| match pipeline.layout {
        Layout::Hwc => (row * width + column) * channels + channel,
        Layout::Chw => (channel * height + row) * width + column,
    };
    let element_bytes = tensor.datatype.bytes();
    let mut bytes = vec![0; tensor.bytes()];
    for (at, &pixel) in pixels.iter().enumerate() {
        let (row, column, channel) = (at / channels / width, at / channels % width, at % channels);
        // Decoders give red first.
        let channel = if pipeline.color == Color::Bgr { channels - 1 - channel } else { channel };
        let pixel = if pipeline.invert { 255 - pixel } else { pixel };
        let into = &mut bytes[place(row, column, channel) * element_bytes..][..element_bytes];
        if tensor.datatype == DataType::Uint8 {
            into[0] = pixel;
        } else {
            let value = (f32::from(pixel) * pipeline.scale - pipeline.mean[channel]) / pipeline.std[channel];
            into.copy_from_slice(&value.to_le_bytes());
        }
    }
    Ok(bytes)
}

fn unusable(cause: String) -> InferError {
    InferError::Invalid(format!("the picture cannot be used: {cause}"))
}

/// The pixels of the tensor's size, channels together.
fn resize(pipeline: &ImagePipeline, decoded: Picture) -> Result<Vec<u8>, String> {
    let size = (decoded.width, decoded.height);
    match pipeline.color {
        Color::Gray => resized::<U8>(pipeline, size, decoded.into_gray()),
        Color::Rgb | Color::Bgr => resized::<U8x3>(pipeline, size, decoded.into_rgb()),
    }
}

/// The same for one type of pixel. Asked by a type that is known only at run time, the library compiles its kernels for
/// all fifteen: a tenth of the binary.
fn resized<P: PixelTrait>(pipeline: &ImagePipeline, size: (u32, u32), pixels: Vec<u8>) -> Result<Vec<u8>, String> {
    let (width, height) = size;
    if size == (pipeline.width, pipeline.height) {
        return Ok(pixels);
    }
    let from = TypedImageRef::<P>::from_buffer(width, height, &pixels).map_err(|error| error.to_string())?;
    let mut resized = vec![0; pipeline.width as usize * pipeline.height as usize * P::size()];
    let mut into = TypedImage::<P>::from_buffer(pipeline.width, pipeline.height, &mut resized)
        .map_err(|error| error.to_string())?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
    let options = match window(pipeline, f64::from(width), f64::from(height)) {
        None => options,
        Some([left, top, width, height]) => options.crop(left, top, width, height),
    };
    Resizer::new().resize_typed(&from, &mut into, &options).map_err(|error| error.to_string())?;
    Ok(resized)
}

/// The part of a picture that becomes the tensor: left, top, width, height. Resizing the whole and cutting its middle
/// out gives the same pixels as resizing the middle alone.
fn window(pipeline: &ImagePipeline, width: f64, height: f64) -> Option<[f64; 4]> {
    if pipeline.crop == 0.0 {
        return None;
    }
    // The tensor's shape, as large as fits the picture, and of that the share.
    let fits = (width / f64::from(pipeline.width)).min(height / f64::from(pipeline.height)) * f64::from(pipeline.crop);
    // A pixel at least: what is next to nothing cannot be resized.
    let [w, h] = [pipeline.width, pipeline.height].map(|side| (f64::from(side) * fits).max(1.0));
    Some([(width - w) / 2.0, (height - h) / 2.0, w, h])
}

#[cfg(test)]
mod tests {
    use png::ColorType;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        budget::Budget,
        picture::{
            png_of,
            tests::{JPEG, progressive},
        },
    };

    fn endless(_: usize) -> Result<(), InferError> {
        Ok(())
    }

    fn pipeline(color: Color, height: u32, width: u32) -> ImagePipeline {
        let channels = color.channels();
        let (mean, std) = (vec![0.0; channels], vec![1.0; channels]);
        ImagePipeline {
            input: 0,
            color,
            height,
            width,
            crop: 0.0,
            invert: false,
            layout: Layout::Hwc,
            scale: 1.0,
            mean,
            std,
        }
    }

    fn tensor(pipeline: &ImagePipeline, datatype: DataType) -> Tensor {
        let shape = vec![pipeline.height as usize, pipeline.width as usize, pipeline.color.channels()];
        Tensor::new("image", datatype, shape)
    }

    fn floats(pipeline: &ImagePipeline, picture: &[u8]) -> Vec<f32> {
        let bytes = tensor_of(pipeline, &tensor(pipeline, DataType::Fp32), picture, endless).unwrap();
        bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
    }

    /// Red rises with the column, green with the row, blue is 7.
    fn gradient(width: u8, height: u8) -> Vec<u8> {
        let pixels: Vec<u8> = (0..height)
            .flat_map(|y| (0..width).flat_map(move |x| [x.wrapping_mul(10), y.wrapping_mul(10), 7]))
            .collect();
        png_of(width.into(), height.into(), ColorType::Rgb, &pixels)
    }

    fn gray(width: u32, height: u32, of: impl Fn(u32, u32) -> u8) -> Vec<u8> {
        let pixels: Vec<u8> = (0..width * height).map(|at| of(at % width, at / width)).collect();
        png_of(width, height, ColorType::Grayscale, &pixels)
    }

    #[test]
    fn every_element_lies_where_the_layout_says() {
        let png = gradient(3, 2);
        let hwc = pipeline(Color::Rgb, 2, 3);
        let expected_hwc = [0, 0, 7, 10, 0, 7, 20, 0, 7, 0, 10, 7, 10, 10, 7, 20, 10, 7].map(|v: u8| f32::from(v));
        assert_eq!(floats(&hwc, &png), expected_hwc);
        let chw = ImagePipeline { layout: Layout::Chw, ..hwc.clone() };
        let expected_chw = [0, 10, 20, 0, 10, 20, 0, 0, 0, 10, 10, 10, 7, 7, 7, 7, 7, 7].map(|v: u8| f32::from(v));
        assert_eq!(floats(&chw, &png), expected_chw);
        let bgr = ImagePipeline { color: Color::Bgr, ..hwc.clone() };
        assert_eq!(floats(&bgr, &png)[3..6], [7.0, 0.0, 10.0]);
        let bytes = tensor_of(&hwc, &tensor(&hwc, DataType::Uint8), &png, endless).unwrap();
        assert_eq!(bytes[..6], [0, 0, 7, 10, 0, 7]);
    }

    #[test]
    fn values_are_normalised_by_channel() {
        let png = gradient(1, 1);
        let normalised = ImagePipeline {
            invert: true,
            scale: 2.0,
            mean: vec![10.0, 20.0, 30.0],
            std: vec![1.0, 2.0, 4.0],
            ..pipeline(Color::Rgb, 1, 1)
        };
        assert_eq!(floats(&normalised, &png), [500.0, 245.0, (248.0 * 2.0 - 30.0) / 4.0]);
    }

    #[test]
    fn a_crop_takes_the_middle_and_a_stretch_takes_all() {
        // Light from 2 pixels outside the middle half: resizing looks a little beyond what it keeps.
        let is_light = |x, y| (28..52).contains(&x) && (8..32).contains(&y);
        let png = gray(80, 40, |x, y| if is_light(x, y) { 200 } else { 0 });
        let middle = ImagePipeline { crop: 0.5, ..pipeline(Color::Gray, 10, 10) };
        assert_eq!(floats(&middle, &png), [200.0; 100]);
        let all = floats(&pipeline(Color::Gray, 10, 10), &png);
        assert!(all[0] == 0.0 && all[55] == 200.0, "{all:?}");
    }

    /// A share of 1e-30 made resizing panic, once for each picture.
    #[test]
    fn the_least_shares_and_sides_are_resized() {
        for (width, height) in [(1, 1), (1, 300), (300, 1), (17, 3)] {
            let png = gray(width, height, |_, _| 200);
            for crop in [1e-30, 0.01, 0.5, 1.0] {
                let least = ImagePipeline { crop, ..pipeline(Color::Gray, 10, 20) };
                assert_eq!(floats(&least, &png), [200.0; 200], "{crop} of {width} x {height}");
            }
        }
    }

    #[test]
    fn what_is_no_picture_or_too_large_a_one_is_an_error_in_one_line() {
        let pipeline = pipeline(Color::Rgb, 4, 4);
        let refused = |picture: &[u8]| {
            let error =
                tensor_of(&pipeline, &tensor(&pipeline, DataType::Fp32), picture, endless).unwrap_err().to_string();
            assert_eq!(error.lines().count(), 1, "{error}");
            error
        };
        assert!(refused(b"").contains("neither JPEG nor PNG"));
        assert!(refused(b"GIF89a........").contains("neither JPEG nor PNG"));
        let png = gradient(20, 20);
        refused(&png[..png.len() / 2]);
        // A few hundred bytes that would become a gigabyte.
        let mut bomb = png.clone();
        bomb[16..24].copy_from_slice(&[0, 0, 0x3f, 0xff, 0, 0, 0x3f, 0xff]);
        let crc = crc32fast::hash(&bomb[12..29]).to_be_bytes();
        bomb[29..33].copy_from_slice(&crc);
        assert!(refused(&bomb).contains("limit"), "{}", refused(&bomb));
        bomb[16..20].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff]);
        let crc = crc32fast::hash(&bomb[12..29]).to_be_bytes();
        bomb[29..33].copy_from_slice(&crc);
        refused(&bomb);
    }

    #[tokio::test]
    async fn what_a_picture_becomes_is_charged_before_it_is_decoded() {
        let (pool, mut budget) = (Pool::default(), Budget::new(100_000));
        let pipeline = pipeline(Color::Rgb, 4, 4);
        let tensor = tensor(&pipeline, DataType::Fp32);
        let charge = budget.account(()).charge();
        let run = |side| {
            let png = Rope::from(gradient(side, side));
            decoded(&pool, &charge, pipeline.clone(), tensor.clone(), png)
        };
        assert!(run(20).await.is_ok());
        assert_eq!(charge.held(), tensor.bytes(), "what it has become");
        let error = run(120).await.unwrap_err();
        assert!(matches!(&error, InferError::MemoryFull(text) if text.contains("bodies_bytes_max")), "{error}");
        charge.release();
        assert_eq!(budget.held(), 0);
    }

    /// 91 scans of 65 million pixels, 265 KB, held a decoder for 1.25 s.
    #[test]
    fn a_picture_with_too_many_scans_for_its_size_is_refused_before_it_is_decoded() {
        let gray = pipeline(Color::Gray, 4, 4);
        let run = |jpeg: &[u8]| tensor_of(&gray, &tensor(&gray, DataType::Fp32), jpeg, endless);
        assert_eq!(run(&progressive(16, 10)).map(|bytes| bytes.len()), Ok(64));
        let error = run(&progressive(8100, 17)).unwrap_err().to_string();
        let expected = "found 17 scans of 8100 x 8100 pixels, expected at most 16 of that size";
        assert_eq!(error, format!("the picture cannot be used: {expected}"));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            head in 0..3usize,
            rest in proptest::collection::vec(any::<u8>(), 0..400),
            cut in 0..500usize,
        ) {
            let pipeline = pipeline(Color::Rgb, 4, 4);
            let start = [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8\xff\xe0", b""][head];
            let tensor = tensor(&pipeline, DataType::Fp32);
            let _ = tensor_of(&pipeline, &tensor, &[start, &rest].concat(), endless);
            let mut damaged = JPEG.to_vec();
            let at = cut % damaged.len();
            damaged.iter_mut().skip(at).zip(&rest).take(3).for_each(|(byte, other)| *byte ^= other);
            let _ = tensor_of(&pipeline, &tensor, &damaged, endless);
        }
    }
}
