//! How a tensor's dimensions lie in memory. What the model sees as reshapes, transpositions, slices and broadcasts are
//! other layouts of the same bytes, as far as strides can say it.

/// Lengths and strides of a tensor's dimensions, in the model's order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    /// Elements of each dimension.
    pub(super) shape: Vec<usize>,
    /// Elements from one index to the next; 0 repeats.
    pub(super) strides: Vec<i64>,
    /// Elements from the base to the first one.
    pub(super) offset: i64,
}

impl Layout {
    /// One after another, in the order of dimensions.
    pub(super) fn dense(shape: &[usize]) -> Self {
        Self::ordered(shape, &(0..shape.len()).collect::<Vec<_>>())
    }

    /// One after another, with dimensions from the outermost to the innermost in this order.
    pub(super) fn ordered(shape: &[usize], order: &[usize]) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            stride *= signed(shape[dim]);
        }
        Self { shape: shape.to_vec(), strides, offset: 0 }
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The dimensions from the outermost to the innermost; what does not matter stays as it is.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rank()).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(self.strides[dim].abs()));
        // Lengths of one have no place in memory: they go where the model has them.
        let mut rest = order.iter().copied().filter(|&dim| self.shape[dim] != 1).collect::<Vec<_>>().into_iter();
        let in_place = (0..self.rank()).map(|dim| if self.shape[dim] == 1 { dim } else { rest.next().unwrap_or(dim) });
        in_place.collect()
    }

    /// Whether all lies as in `other`, wherever that starts.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let same = |dim: usize| self.shape[dim] <= 1 || self.strides[dim] == other.strides[dim];
        self.shape == other.shape && (0..self.rank()).all(same)
    }

    /// Whether it is one after another in this order of dimensions.
    pub(super) fn is_packed(&self, order: &[usize]) -> bool {
        self.is_like(&Self::ordered(&self.shape, order))
    }

    /// Whether all elements have one place.
    pub(super) fn is_uniform(&self) -> bool {
        (0..self.rank()).all(|dim| self.shape[dim] == 1 || self.strides[dim] == 0)
    }

    pub(super) fn with_dim(&self, at: usize) -> Self {
        let mut new = self.clone();
        new.shape.insert(at, 1);
        new.strides.insert(at, 0);
        new
    }

    pub(super) fn without_dim(&self, at: usize) -> Self {
        let mut new = self.clone();
        new.shape.remove(at);
        new.strides.remove(at);
        new
    }

    pub(super) fn moved(&self, from: usize, to: usize) -> Self {
        let mut new = self.clone();
        let (length, stride) = (new.shape.remove(from), new.strides.remove(from));
        new.shape.insert(to, length);
        new.strides.insert(to, stride);
        new
    }

    /// Every `step`th index from `start` on, `length` of them.
    pub(super) fn sliced(&self, dim: usize, start: usize, length: usize, step: i64) -> Self {
        let mut new = self.clone();
        new.offset += signed(start) * self.strides[dim];
        new.strides[dim] *= step;
        new.shape[dim] = length;
        new
    }

    /// Repeats dimensions of length one, and the whole in those that `shape` has in front.
    pub(super) fn broadcast(&self, shape: &[usize]) -> Self {
        let mut new = self.clone();
        let in_front = shape.len() - self.rank();
        new.shape.splice(..0, shape[..in_front].iter().copied());
        new.strides.splice(..0, std::iter::repeat_n(0, in_front));
        for (dim, &length) in shape.iter().enumerate() {
            if new.shape[dim] != length {
                new.strides[dim] = 0;
                new.shape[dim] = length;
            }
        }
        new
    }

    /// The same elements in the same order as another shape, if strides can say that.
    pub(super) fn reshaped(&self, shape: &[usize]) -> Option<Self> {
        let old: Vec<(usize, i64)> = (0..self.rank())
            .filter(|&dim| self.shape[dim] != 1)
            .map(|dim| (self.shape[dim], self.strides[dim]))
            .collect();
        let mut strides = vec![0; shape.len()];
        let (mut from, mut to) = (0, 0);
        while from < old.len() || to < shape.len() {
            if to < shape.len() && shape[to] == 1 {
                to += 1;
                continue;
            }
            // The shortest run of old dimensions that holds as many elements as one of new dimensions.
            let (first_old, first_new) = (from, to);
            let (mut had, mut has) = (old.get(from)?.0, *shape.get(to)?);
            (from, to) = (from + 1, to + 1);
            while had != has {
                if had < has {
                    had *= old.get(from)?.0;
                    from += 1;
                } else {
                    has *= shape.get(to)?;
                    to += 1;
                }
            }
            let run = &old[first_old..from];
            if run.windows(2).any(|pair| pair[0].1 != pair[1].1 * signed(pair[1].0)) {
                return None;
            }
            let mut stride = run.last()?.1;
            for dim in (first_new..to).rev() {
                strides[dim] = stride;
                stride *= signed(shape[dim]);
            }
        }
        Some(Self { shape: shape.to_vec(), strides, offset: self.offset })
    }

    /// Length and stride of these dimensions as one, from the outermost to the innermost, if they can be.
    pub(super) fn merged(&self, dims: &[usize]) -> Option<(usize, i64)> {
        let mut run = dims.iter().copied().filter(|&dim| self.shape[dim] != 1).rev();
        let Some(last) = run.next() else { return Some((1, 0)) };
        let mut length = self.shape[last];
        for dim in run {
            if self.strides[dim] != self.strides[last] * signed(length) {
                return None;
            }
            length *= self.shape[dim];
        }
        Some((length, self.strides[last]))
    }

    /// These dimensions, from the outermost to the innermost.
    pub(super) fn by_stride(&self, dims: &[usize]) -> Vec<usize> {
        let mut dims = dims.to_vec();
        dims.sort_by_key(|&dim| std::cmp::Reverse(self.strides[dim].abs()));
        dims
    }

    /// The elements that it walks over, in the order of dimensions.
    pub(super) fn read<T: Copy>(&self, from: &[T]) -> Vec<T> {
        let dense = Self { offset: self.offset, ..Self::dense(&self.shape) };
        if self.is_like(&dense) && self.elements() > 0 {
            let start = usize::try_from(self.offset).expect("a layout stays inside its tensor");
            return from[start..start + self.elements()].to_vec();
        }
        let mut read = Vec::with_capacity(self.elements());
        self.walk(0, self.offset, &mut |at| {
            read.push(from[usize::try_from(at).expect("a layout stays inside its tensor")]);
        });
        read
    }

    /// Where its elements are, in the order of dimensions.
    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<i64> {
        let mut places = Vec::with_capacity(self.elements());
        self.walk(0, self.offset, &mut |at| places.push(at));
        places
    }

    fn walk(&self, dim: usize, at: i64, visit: &mut dyn FnMut(i64)) {
        if dim == self.rank() {
            return visit(at);
        }
        for index in 0..self.shape[dim] {
            self.walk(dim + 1, at + signed(index) * self.strides[dim], visit);
        }
    }
}

/// Lengths of tensors are far below what does not fit.
pub(super) fn signed(length: usize) -> i64 {
    i64::try_from(length).expect("a length fits 63 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A layout whose dimensions lie in some order, the same elements as they are read, and another shape for them.
    fn layouts() -> impl Strategy<Value = (Layout, Vec<usize>)> {
        let factors = proptest::collection::vec(1_usize..4, 1..6);
        (factors, any::<u64>(), any::<u64>()).prop_map(|(factors, first, second)| {
            let grouped = |cuts: u64| -> Vec<usize> {
                let mut shape = vec![1];
                for (at, &factor) in factors.iter().enumerate() {
                    if cuts >> at & 1 == 1 {
                        shape.push(1);
                    }
                    *shape.last_mut().unwrap() *= factor;
                }
                shape
            };
            let shape = grouped(first);
            let mut order: Vec<usize> = (0..shape.len()).collect();
            order.rotate_left(usize::try_from(first >> 32).unwrap() % shape.len());
            (Layout::ordered(&shape, &order), grouped(second))
        })
    }

    proptest! {
        #[test]
        fn reshapes_keep_the_order_of_elements((layout, shape) in layouts()) {
            let dense = Layout::dense(&layout.shape);
            prop_assert!(dense.reshaped(&shape).is_some_and(|it| it.is_like(&Layout::dense(&shape))));
            if let Some(reshaped) = layout.reshaped(&shape) {
                prop_assert_eq!(reshaped.places(), layout.places());
            }
            prop_assert!(layout.is_packed(&layout.order()), "{:?}", layout);
        }

        #[test]
        fn merged_dimensions_are_walked_as_one((layout, _) in layouts(), dims in 1_usize..6) {
            let dims: Vec<usize> = (0..dims.min(layout.rank())).collect();
            if let Some((length, stride)) = layout.merged(&dims) {
                let own = Layout {
                    shape: dims.iter().map(|&dim| layout.shape[dim]).collect(),
                    strides: dims.iter().map(|&dim| layout.strides[dim]).collect(),
                    offset: 0,
                };
                prop_assert_eq!(own.places(), (0..signed(length)).map(|at| at * stride).collect::<Vec<_>>());
            }
        }
    }
}
