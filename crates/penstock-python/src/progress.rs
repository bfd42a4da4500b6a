//! Reads the numbers of a job's progress from Python.

use penstock_worker::{Count, encode_progress};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[derive(FromPyObject)]
pub(crate) enum Number {
    Whole(i64),
    Real(f64),
}

impl Number {
    fn count(self) -> PyResult<Count> {
        match self {
            Self::Whole(number) => Ok(Count::Whole(number)),
            Self::Real(number) if number.is_finite() => Ok(Count::Real(number)),
            Self::Real(number) => {
                let why = format!("progress must be a finite number, not {number}");
                Err(PyValueError::new_err(why))
            }
        }
    }
}

pub(crate) fn encode(done: Number, total: Option<Number>, message: &str) -> PyResult<Vec<u8>> {
    let total = total.map(Number::count).transpose()?;
    Ok(encode_progress(done.count()?, total, message))
}
