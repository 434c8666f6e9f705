//! Where a tensor lies.

use std::rc::Rc;

use tract_onnx::prelude::*;

use super::layout::Layout;
use crate::plan::Type;

/// Where a tensor's bytes are.
#[derive(Debug, Clone)]
pub(super) enum Base {
    /// In the buffer of this number, at this address.
    Buffer(usize, usize),
    /// Among the model's weights, once somebody needs it there.
    Constant(Arc<Tensor>, Rc<str>),
}

impl PartialEq for Base {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Buffer(a, _), Self::Buffer(b, _)) => a == b,
            (Self::Constant(a, _), Self::Constant(b, _)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// A tensor that is in memory.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stored {
    pub(super) base: Base,
    pub(super) ty: Type,
    pub(super) layout: Layout,
}

impl Stored {
    /// The constant that it is a view of.
    pub(super) fn constant(&self) -> Option<(&Arc<Tensor>, &str)> {
        match &self.base {
            Base::Constant(tensor, name) => Some((tensor, name)),
            Base::Buffer(..) => None,
        }
    }
}
