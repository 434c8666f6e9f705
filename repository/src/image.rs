//! The image pipeline of a model: how a picture becomes its input (parameter `image` of `config.pbtxt`).

use serde::Deserialize;

use crate::tensor::{DataType, Tensor};

/// Less of a picture than this, other than 0, is a mistake; of much less resizing would make nothing.
const CROP_MIN: f32 = 0.01;

/// How a picture becomes a tensor. Values are `(pixel * scale - mean) / std` with pixels of 0 to 255, or the pixels
/// themselves where the input is UINT8.
#[derive(Debug, Clone, PartialEq)]
pub struct ImagePipeline {
    /// Which input.
    pub input: usize,
    /// Its channels.
    pub color: Color,
    /// Rows of the tensor.
    pub height: u32,
    /// Columns of the tensor.
    pub width: u32,
    /// 0 stretches the picture to the tensor's size. Otherwise the picture is resized, its sides in proportion, until
    /// this share of the shorter one fits, and its middle cut out: 0.875 is 256 to 224.
    pub crop: f32,
    /// Light becomes dark before anything else.
    pub invert: bool,
    /// Order of the elements.
    pub layout: Layout,
    /// See above.
    pub scale: f32,
    /// One for each channel.
    pub mean: Vec<f32>,
    /// One for each channel.
    pub std: Vec<f32>,
}

/// The channels of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Color {
    /// One.
    Gray,
    /// Red, green, blue.
    Rgb,
    /// Blue, green, red.
    Bgr,
}

impl Color {
    /// How many.
    #[must_use]
    pub fn channels(self) -> usize {
        match self {
            Self::Gray => 1,
            Self::Rgb | Self::Bgr => 3,
        }
    }
}

/// The order of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Channel by channel.
    Chw,
    /// Pixel by pixel.
    Hwc,
}

/// As it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    input: Option<String>,
    color: Color,
    size: Option<[u32; 2]>,
    #[serde(default)]
    crop: f32,
    #[serde(default)]
    invert: bool,
    layout: Layout,
    scale: Option<f32>,
    mean: Option<Vec<f32>>,
    std: Option<Vec<f32>>,
}

impl ImagePipeline {
    /// Reads an inline table of TOML, such as `{ color = 'rgb', layout = 'chw', crop = 0.875, scale = 0.00392 }`. The
    /// size is that of the input's shape, or `size = [height, width]` where the shape does not tell it.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub(crate) fn parse(text: &str, inputs: &[Tensor]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Parameter {
            image: Written,
        }
        let Parameter { image } = toml::from_str(&format!("image = {}", text.replace('\n', " ")))
            .map_err(|error| error.message().replace('\n', "; "))?;
        let input = match &image.input {
            None if inputs.len() == 1 => 0,
            None => return Err("input: none, expected which of the inputs the picture becomes".into()),
            Some(name) => inputs
                .iter()
                .position(|tensor| tensor.name == *name)
                .ok_or_else(|| format!("input: no input is called \"{name}\""))?,
        };
        let tensor = &inputs[input];
        if tensor.variable.is_some() {
            return Err(format!("the size of input \"{}\" differs between requests, expected one size", tensor.name));
        }
        let (height, width) = image.size(tensor)?;
        let channels = image.color.channels();
        let elements = [height, width].iter().try_fold(channels, |product, side| product.checked_mul(*side as usize));
        if elements != Some(tensor.elements()) {
            return Err(format!(
                "{channels} channels of {height} x {width} pixels are not the {} elements of input \"{}\"",
                tensor.elements(),
                tensor.name
            ));
        }
        let per_channel = |key: &str, found: &Option<Vec<f32>>, default: f32| match found {
            None => Ok(vec![default; channels]),
            Some(values) if values.len() == channels => Ok(values.clone()),
            Some(values) => {
                Err(format!("{key}: found {} values, expected one for each of {channels} channels", values.len()))
            }
        };
        let (mean, std) = (per_channel("mean", &image.mean, 0.0)?, per_channel("std", &image.std, 1.0)?);
        if std.iter().any(|std| !(std.is_finite() && *std != 0.0)) {
            return Err("std: expected values other than 0".into());
        }
        match tensor.datatype {
            DataType::Fp32 => {}
            DataType::Uint8 if image.scale.is_none() && image.mean.is_none() && image.std.is_none() => {}
            DataType::Uint8 => return Err("scale, mean and std need an input of TYPE_FP32, found TYPE_UINT8".into()),
            other => return Err(format!("the input is TYPE_{other}, expected TYPE_FP32 or TYPE_UINT8")),
        }
        if image.crop != 0.0 && !(CROP_MIN..=1.0).contains(&image.crop) {
            return Err(format!("crop: found {}, expected 0 (stretch), or {CROP_MIN} to 1", image.crop));
        }
        let scale = image.scale.unwrap_or(1.0);
        let Written { color, crop, invert, layout, .. } = image;
        Ok(Self { input, color, height, width, crop, invert, layout, scale, mean, std })
    }
}

impl Written {
    fn size(&self, tensor: &Tensor) -> Result<(u32, u32), String> {
        if let Some([height, width]) = self.size {
            return Ok((height, width));
        }
        let sides = match (self.layout, &tensor.shape[..]) {
            (Layout::Chw, [_, height, width]) | (Layout::Hwc, [height, width, _]) | (_, [height, width]) => {
                [*height, *width]
            }
            (_, shape) => {
                return Err(format!("size: none, and the shape {shape:?} does not tell it; expected [height, width]"));
            }
        };
        let [height, width] = sides.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
        Ok((height, width))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(datatype: DataType, shape: &[usize]) -> Tensor {
        Tensor::new("image", datatype, shape.to_vec())
    }

    #[test]
    fn a_pipeline_is_read() {
        let imagenet =
            "{ color = 'rgb', layout = 'chw', crop = 0.875, scale = 0.5,\n mean = [1, 2, 3], std = [4, 5, 6] }";
        let pipeline = ImagePipeline::parse(imagenet, &[tensor(DataType::Fp32, &[3, 224, 112])]).unwrap();
        assert_eq!((pipeline.height, pipeline.width, pipeline.crop), (224, 112, 0.875));
        assert_eq!((pipeline.mean, pipeline.std, pipeline.scale), (vec![1.0, 2.0, 3.0], vec![4.0, 5.0, 6.0], 0.5));
        let flat = ImagePipeline::parse(
            "{ color = 'gray', layout = 'hwc', size = [8, 8] }",
            &[tensor(DataType::Uint8, &[64])],
        );
        assert_eq!((flat.as_ref().unwrap().color, flat.unwrap().mean), (Color::Gray, vec![0.0]));
    }

    #[test]
    fn what_cannot_be_is_named() {
        let refused = |text: &str, datatype, shape: &[usize]| {
            let error = ImagePipeline::parse(text, &[tensor(datatype, shape)]).unwrap_err();
            assert_eq!(error.lines().count(), 1, "{error}");
            error
        };
        let rgb = |rest: &str| format!("{{ color = 'rgb', layout = 'chw'{rest} }}");
        let shape = [3, 8, 8];
        assert!(refused("nonsense", DataType::Fp32, &shape).contains("expected"), "not TOML");
        assert!(refused(&rgb(", colour = 1"), DataType::Fp32, &shape).contains("colour"));
        assert!(refused("{ color = 'red', layout = 'chw' }", DataType::Fp32, &shape).contains("red"));
        assert!(refused(&rgb(""), DataType::Fp32, &[192]).starts_with("size: none"));
        assert!(refused(&rgb(""), DataType::Fp32, &[1, 8, 8]).contains("are not the 64 elements"));
        assert!(refused(&rgb(", mean = [1]"), DataType::Fp32, &shape).starts_with("mean: found 1 values"));
        assert!(refused(&rgb(", std = [1, 0, 1]"), DataType::Fp32, &shape).starts_with("std: "));
        assert!(refused(&rgb(", scale = 2"), DataType::Uint8, &shape).contains("TYPE_FP32"));
        assert!(refused(&rgb(""), DataType::Int64, &shape).starts_with("the input is TYPE_INT64"));
        for crop in ["2", "1e-30", "0.0099", "-1", "nan", "inf"] {
            let error = refused(&rgb(&format!(", crop = {crop}")), DataType::Fp32, &shape);
            assert!(error.starts_with("crop: found ") && error.ends_with("0.01 to 1"), "{error}");
        }
        assert!(refused(&rgb(", input = 'x'"), DataType::Fp32, &shape).contains("\"x\""));
    }
}
