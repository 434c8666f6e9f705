//! Charts as SVG: a title, panels in a grid, one legend below.
//!
//! Text is set by whoever shows the SVG, so widths of text are estimated and no font of this machine is needed.
#![forbid(unsafe_code)]

use plotters::{
    chart::ChartBuilder,
    coord::{Shift, types::RangedCoordf64},
    element::{Circle, Cross, EmptyElement, PathElement, Rectangle, Text, TriangleMarker},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// A figure of one or more panels.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Above all panels.
    pub title: String,
    /// Panels beside each other; the rest goes below.
    pub columns: usize,
    /// Width and height of each panel, in pixels.
    pub panel: (u32, u32),
    /// At least one.
    pub panels: Vec<Panel>,
}

/// One pair of axes with what is drawn on it.
#[derive(Debug, Clone)]
pub struct Panel {
    /// Above the axes.
    pub title: String,
    /// Across.
    pub x: Axis,
    /// Up.
    pub y: Axis,
    /// Lines and bars; those of one name look alike in all panels.
    pub series: Vec<Series>,
    /// Batches, over the axes.
    pub boxes: Vec<Slice>,
}

/// What an axis shows.
#[derive(Debug, Clone)]
pub struct Axis {
    /// With its unit.
    pub label: String,
    /// The smallest and the largest value.
    pub range: (f64, f64),
    /// Names of the values 0.5, 1.5, ... instead of numbers.
    pub names: Vec<String>,
}

impl Axis {
    /// Of numbers.
    pub fn new(label: &str, range: (f64, f64)) -> Self {
        Self { label: label.to_owned(), range, names: Vec::new() }
    }

    /// From 0 to a little above the largest value.
    pub fn up_to(label: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let max = values.into_iter().fold(0.0, f64::max);
        Self::new(label, (0.0, if max > 0.0 { 1.08 * max } else { 1.0 }))
    }

    /// Of names.
    pub fn named(label: &str, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let names: Vec<_> = names.into_iter().map(Into::into).collect();
        Self { label: label.to_owned(), range: (0.0, names.len() as f64), names }
    }
}

/// Points under one name.
#[derive(Debug, Clone)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// How it is drawn.
    pub mark: Mark,
    /// The same look for the same number; see `look`.
    pub look: usize,
    /// x and y. For bars x is the index of the group.
    pub points: Vec<(f64, f64)>,
}

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A line through marked points.
    Line,
    /// A line only, for many points.
    Curve,
    /// A dashed line: a bound, or what a paper reports.
    Dashed,
    /// Marks only.
    Points,
    /// A bar in the group x, `place` of `places` from its left.
    Bar {
        /// From 0.
        place: usize,
        /// Bars in a group.
        places: usize,
    },
    /// What a paper reports for the bar at that place: a diamond.
    Reported {
        /// From 0.
        place: usize,
        /// Bars in a group.
        places: usize,
    },
}

/// A box from `x.0` to `x.1` in a row, with text.
#[derive(Debug, Clone)]
pub struct Slice {
    /// From 0 at the bottom.
    pub row: usize,
    /// Its ends.
    pub x: (f64, f64),
    /// Within it.
    pub text: String,
    /// See `look`.
    pub look: usize,
}

/// Colours that stay apart for colour-blind readers (Okabe and Ito).
const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(140, 86, 75),
    RGBColor(0, 0, 0),
    RGBColor(102, 45, 145),
    RGBColor(130, 130, 130),
];
/// The look of what is not ours: grey.
pub const GREY: usize = COLOURS.len() - 1;
/// The look of bounds: black.
pub const BOUND: usize = GREY - 2;

const TITLE_HEIGHT: u32 = 34;
const LEGEND_ROW: u32 = 22;
const MARGIN: i32 = 12;
/// Sizes of text; plotters draws them at 1 / 1.24 of a pixel.
const TITLE_TEXT: u32 = 22;
const PANEL_TEXT: u32 = 18;
const TEXT: u32 = 15;
const GRID: RGBColor = RGBColor(225, 225, 225);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Axes<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type DrawError = DrawingAreaErrorKind<std::io::Error>;

impl Chart {
    /// With panels of the usual size.
    pub fn new(title: impl Into<String>, columns: usize, panels: Vec<Panel>) -> Self {
        Self { title: title.into(), columns, panel: (470, 310), panels }
    }

    /// The SVG document.
    pub fn svg(&self) -> String {
        let columns = self.columns.min(self.panels.len()).max(1);
        let rows = self.panels.len().div_ceil(columns);
        let width = columns as u32 * self.panel.0;
        let legend = Legend::new(self, width);
        let height = TITLE_HEIGHT + rows as u32 * self.panel.1 + legend.height();
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        // Drawing into a string fails only where a range or an area is empty, which is ours to avoid.
        self.draw(&root, &legend, (columns, rows)).expect("a chart can be drawn into memory");
        drop(root);
        svg
    }

    fn draw(&self, root: &Area<'_>, legend: &Legend, (columns, rows): (usize, usize)) -> Result<(), DrawError> {
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(TITLE_HEIGHT);
        let centre = root.dim_in_pixel().0 as i32 / 2;
        head.draw(&Text::new(self.title.as_str(), (centre, 10), font(TITLE_TEXT, HPos::Center, VPos::Top)))?;
        let (grid, foot) = body.split_vertically(rows as u32 * self.panel.1);
        for (panel, area) in self.panels.iter().zip(grid.split_evenly((rows, columns))) {
            panel.draw(&area, root)?;
        }
        legend.draw(&foot)?;
        root.present()
    }
}

impl Panel {
    fn draw(&self, area: &Area<'_>, root: &Area<'_>) -> Result<(), DrawError> {
        let mut axes = ChartBuilder::on(area)
            .margin(MARGIN)
            .margin_top(4)
            .caption(&self.title, ("sans-serif", PANEL_TEXT))
            .x_label_area_size(38)
            .y_label_area_size(if self.y.names.is_empty() { 76 } else { 60 })
            .build_cartesian_2d(self.x.range.0..self.x.range.1, self.y.range.0..self.y.range.1)?;
        axes.configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(if self.boxes.is_empty() { GRID } else { WHITE })
            .axis_style(BLACK)
            .x_desc(&self.x.label)
            .y_desc(&self.y.label)
            .x_labels(if self.x.names.is_empty() { 9 } else { 0 })
            .y_labels(if self.y.names.is_empty() { 7 } else { 0 })
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .draw()?;
        self.draw_names(&axes, root)?;
        for slice in &self.boxes {
            slice.draw(&mut axes)?;
        }
        for series in &self.series {
            series.draw(&mut axes)?;
        }
        Ok(())
    }

    fn draw_names(&self, axes: &Axes<'_, '_>, root: &Area<'_>) -> Result<(), DrawError> {
        let centres = |names: &[String]| (0..names.len()).map(|index| index as f64 + 0.5).collect::<Vec<_>>();
        for (x, name) in centres(&self.x.names).into_iter().zip(&self.x.names) {
            let (x, y) = axes.plotting_area().map_coordinate(&(x, self.y.range.0));
            root.draw(&Text::new(name.as_str(), (x, y + 5), font(TEXT, HPos::Center, VPos::Top)))?;
        }
        for (y, name) in centres(&self.y.names).into_iter().zip(&self.y.names) {
            let (x, y) = axes.plotting_area().map_coordinate(&(self.x.range.0, y));
            root.draw(&Text::new(name.as_str(), (x - 6, y), font(TEXT, HPos::Right, VPos::Center)))?;
        }
        Ok(())
    }
}

impl Series {
    fn draw(&self, axes: &mut Axes<'_, '_>) -> Result<(), DrawError> {
        let colour = COLOURS[self.look % COLOURS.len()];
        let line = colour.stroke_width(2);
        match self.mark {
            Mark::Line | Mark::Curve => {
                axes.draw_series(LineSeries::new(self.points.iter().copied(), line))?;
            }
            Mark::Dashed => {
                axes.draw_series(DashedLineSeries::new(self.points.iter().copied(), 6, 4, line))?;
            }
            Mark::Points | Mark::Bar { .. } | Mark::Reported { .. } => {}
        }
        match self.mark {
            Mark::Line | Mark::Points => {
                for &at in &self.points {
                    axes.draw_series([EmptyElement::at(at) + marker(self.look)])?;
                }
            }
            Mark::Bar { place, places } => {
                let (from, width) = (0.1 + 0.8 * place as f64 / places as f64, 0.8 / places as f64);
                for &(group, value) in &self.points {
                    let left = group + from;
                    let corners = [(left, 0.0), (left + 0.94 * width, value)];
                    axes.draw_series([Rectangle::new(corners, colour.filled())])?;
                    let top = (left + 0.47 * width, value);
                    let style = font(TEXT - 3, HPos::Center, VPos::Bottom);
                    axes.draw_series([EmptyElement::at(top) + Text::new(number(value), (0, -2), style)])?;
                }
            }
            Mark::Reported { place, places } => {
                // Beside the bar's own number.
                let centre = 0.1 + 0.8 * (place as f64 + 0.12) / places as f64;
                for &(group, value) in &self.points {
                    for part in diamond() {
                        axes.draw_series([EmptyElement::at((group + centre, value)) + part])?;
                    }
                }
            }
            Mark::Curve | Mark::Dashed => {}
        }
        Ok(())
    }
}

impl Slice {
    fn draw(&self, axes: &mut Axes<'_, '_>) -> Result<(), DrawError> {
        let colour = COLOURS[self.look % COLOURS.len()];
        let row = self.row as f64;
        let corners = [(self.x.0, row + 0.2), (self.x.1, row + 0.8)];
        axes.draw_series([Rectangle::new(corners, colour.mix(0.35).filled())])?;
        axes.draw_series([Rectangle::new(corners, colour.stroke_width(1))])?;
        let centre = (f64::midpoint(self.x.0, self.x.1), row + 0.5);
        let style = font(TEXT, HPos::Center, VPos::Center);
        axes.draw_series([EmptyElement::at(centre) + Text::new(self.text.clone(), (0, 0), style)])?;
        Ok(())
    }
}

/// A shape for each look, so that colour is not all that tells lines apart.
fn marker<'a>(look: usize) -> DynElement<'static, SVGBackend<'a>, (i32, i32)> {
    let colour = COLOURS[look % COLOURS.len()];
    match look % 4 {
        0 => Circle::new((0, 0), 4, colour.filled()).into_dyn(),
        1 => Rectangle::new([(-4, -4), (4, 4)], colour.filled()).into_dyn(),
        2 => TriangleMarker::new((0, 0), 6, colour.filled()).into_dyn(),
        _ => Cross::new((0, 0), 4, colour.stroke_width(2)).into_dyn(),
    }
}

/// White with a black edge: seen on a bar of any colour.
fn diamond<'a>() -> [DynElement<'static, SVGBackend<'a>, (i32, i32)>; 2] {
    let corners = vec![(0, -6), (5, 0), (0, 6), (-5, 0), (0, -6)];
    let edge = PathElement::new(corners.clone(), BLACK.stroke_width(2));
    [Polygon::new(corners, WHITE.filled()).into_dyn(), edge.into_dyn()]
}

/// The names of all series, once each, in rows.
struct Legend {
    /// Left and top, name, mark, look.
    entries: Vec<((i32, i32), String, Mark, usize)>,
    rows: u32,
}

impl Legend {
    fn new(chart: &Chart, width: u32) -> Self {
        let mut legend = Self { entries: Vec::new(), rows: 0 };
        let (mut x, mut row) = (MARGIN, 0);
        for series in chart.panels.iter().flat_map(|panel| &panel.series) {
            if series.name.is_empty() || legend.entries.iter().any(|(_, name, ..)| *name == series.name) {
                continue;
            }
            let length = 52 + (7.0 * series.name.chars().count() as f64) as i32;
            if x + length > width as i32 && x > MARGIN {
                (x, row) = (MARGIN, row + 1);
            }
            let at = (x, LEGEND_ROW as i32 * row + LEGEND_ROW as i32 / 2);
            legend.entries.push((at, series.name.clone(), series.mark, series.look));
            x += length;
            legend.rows = row as u32 + 1;
        }
        legend
    }

    fn height(&self) -> u32 {
        self.rows * LEGEND_ROW + 8
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), DrawError> {
        for ((x, y), name, mark, look) in &self.entries {
            let (x, y) = (*x, *y);
            let colour = COLOURS[look % COLOURS.len()];
            let at = EmptyElement::at((x + 14, y));
            match mark {
                Mark::Line => {
                    area.draw(&PathElement::new([(x, y), (x + 28, y)], colour.stroke_width(2)))?;
                    area.draw(&(at + marker(*look)))?;
                }
                Mark::Curve => area.draw(&PathElement::new([(x, y), (x + 28, y)], colour.stroke_width(2)))?,
                Mark::Dashed => {
                    for from in [x, x + 10, x + 20] {
                        area.draw(&PathElement::new([(from, y), (from + 6, y)], colour.stroke_width(2)))?;
                    }
                }
                Mark::Points => area.draw(&(at + marker(*look)))?,
                Mark::Bar { .. } => area.draw(&Rectangle::new([(x + 6, y - 6), (x + 24, y + 6)], colour.filled()))?,
                Mark::Reported { .. } => {
                    for part in diamond() {
                        area.draw(&(EmptyElement::at((x + 14, y)) + part))?;
                    }
                }
            }
            area.draw(&Text::new(name.as_str(), (x + 34, y), font(TEXT, HPos::Left, VPos::Center)))?;
        }
        Ok(())
    }
}

fn font(size: u32, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(horizontal, vertical))
}

/// For people: at most three digits that matter after a point, thousands apart.
pub fn number(value: f64) -> String {
    let text = match value.abs() {
        0.0 => return "0".to_owned(),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    let whole = digits.find('.').unwrap_or(digits.len());
    let mut grouped = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && index < whole && (whole - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_grouped() {
        let expected = [
            (0.0, "0"),
            (0.25, "0.25"),
            (1.0, "1"),
            (12.34, "12.3"),
            (999.6, "1,000"),
            (1_234_567.0, "1,234,567"),
            (-4501.2, "-4,501"),
        ];
        for (value, text) in expected {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_chart_holds_its_text_and_one_legend_entry_for_each_name() {
        let series = |mark| Series { name: "limit".to_owned(), mark, look: 1, points: vec![(0.0, 1.0), (1.0, 2.0)] };
        let panel = |mark| Panel {
            title: "panel".to_owned(),
            x: Axis::named("system", ["left", "right"]),
            y: Axis::up_to("goodput (r/s)", [2.0]),
            series: vec![series(mark)],
            boxes: vec![Slice { row: 0, x: (0.0, 1.0), text: "four".to_owned(), look: 0 }],
        };
        let bar = Mark::Bar { place: 0, places: 1 };
        let svg = Chart::new("title", 2, vec![panel(Mark::Line), panel(bar)]).svg();
        for (text, count) in [("title", 1), ("panel", 2), ("left", 2), ("goodput (r/s)", 2), ("four", 2), ("limit", 1)]
        {
            assert_eq!(svg.lines().filter(|line| line.trim() == text).count(), count, "{text}");
        }
    }
}
