//! Pictures that clients send: any bytes become exactly the tensor that the model wants, or an error of one line, and
//! no picture takes more memory than its decoder's limit (`fuzz/run` bounds the process).
#![no_main]

use gateway::image::tensor_of;
use libfuzzer_sys::fuzz_target;
use repository::{Color, DataType, ImagePipeline, Layout, Tensor};

fuzz_target!(|input: (u8, u8, u8, &[u8])| {
    let (height, width, choices, picture) = input;
    let (height, width) = (u32::from(height % 64) + 1, u32::from(width % 64) + 1);
    let color = [Color::Gray, Color::Rgb, Color::Bgr][usize::from(choices % 3)];
    let channels = color.channels();
    let layout = if choices & 4 == 0 { Layout::Chw } else { Layout::Hwc };
    let pipeline = ImagePipeline {
        input: 0,
        color,
        height,
        width,
        crop: [0.0, 0.875, 1.0, 0.01][usize::from(choices >> 3 & 3)],
        invert: choices & 0x20 != 0,
        layout,
        scale: 1.0 / 255.0,
        mean: vec![0.5; channels],
        std: vec![0.25; channels],
    };
    let [h, w] = [height, width].map(|side| side as usize);
    let shape = if layout == Layout::Chw { vec![channels, h, w] } else { vec![h, w, channels] };
    let datatype = if choices & 0x40 == 0 { DataType::Uint8 } else { DataType::Fp32 };
    let tensor = Tensor::new("image", datatype, shape);
    match tensor_of(&pipeline, &tensor, picture, |_| Ok(())) {
        Ok(bytes) => assert_eq!(bytes.len(), tensor.bytes()),
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
    }
});
