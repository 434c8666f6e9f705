//! soft-roce
