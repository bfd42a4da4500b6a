//! Makes the objects of a loaded app immortal (PEP 683), so that using one writes nothing to its memory.
//!
//! A fork shares its memory until it writes, and Python writes to an object whenever it counts a reference. CPython 3.12
//! and newer don't count the references to immortal objects. With an app of 300 mapped classes and pandas on Python 3.13,
//! a process for one job then copies 1,170 pages instead of 2,080 (docs/internals/profile.md).
//!
//! An immortal object is never freed. The zygote's objects live as long as its processes anyway, except those that a
//! process would drop; to free them there would first copy their pages.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// Reference count of an immortal object, in the low half of the word, in CPython 3.12 and 3.13.
const IMMORTAL: u32 = u32::MAX;
/// Objects whose references are asked for at once.
const CHUNK: usize = 4096;

/// Make all objects that the collector knows immortal, and what they refer to. Return the number of objects.
///
/// Does nothing, and returns 0, on versions of Python without immortal objects, or where they are marked differently.
#[pyfunction]
pub(crate) fn make_immortal(py: Python<'_>) -> PyResult<usize> {
    if !marks_like_this(py)? {
        return Ok(0);
    }
    let gc = py.import("gc")?;
    let get_referents = gc.getattr("get_referents")?;
    let code_type = py.import("types")?.getattr("CodeType")?;
    let mut count = 0;
    let all = gc.call_method0("get_objects")?.cast_into::<PyList>()?;
    let mut found = immortal_from_now(&all);
    drop(all);
    while !found.is_empty() {
        count += found.len();
        let mut next = Vec::new();
        for chunk in found.chunks(CHUNK) {
            // SAFETY: these objects are immortal, so the pointers stay valid.
            let objects = chunk
                .iter()
                .map(|object| unsafe { Bound::from_borrowed_ptr(py, *object) });
            let objects = PyTuple::new(py, objects.collect::<Vec<_>>())?;
            let referents = get_referents.call1(&objects)?.cast_into::<PyList>()?;
            next.append(&mut immortal_from_now(&referents));
            // The collector does not know code objects, nor what they refer to.
            for object in objects
                .iter()
                .filter(|object| object.is_exact_instance(&code_type))
            {
                let consts = PyList::new(py, [object.getattr("co_consts")?])?;
                next.append(&mut immortal_from_now(&consts));
            }
        }
        found = next;
    }
    Ok(count)
}

/// Whether this interpreter marks immortal objects with [`IMMORTAL`].
fn marks_like_this(py: Python<'_>) -> PyResult<bool> {
    let sys = py.import("sys")?;
    let version = py.version_info();
    let is_cpython = sys
        .getattr("implementation")?
        .getattr("name")?
        .extract::<String>()?
        == "cpython";
    // Builds without a global lock count in two fields. Debug builds check the counts.
    let flags = sys.getattr("abiflags")?.extract::<String>()?;
    Ok(is_cpython
        && (version.major, version.minor) >= (3, 12)
        && (version.major, version.minor) <= (3, 13)
        && !flags.contains(['t', 'd'])
        && cfg!(target_pointer_width = "64")
        && cfg!(target_endian = "little"))
}

/// Makes these objects immortal. Returns those that were not.
fn immortal_from_now(objects: &Bound<'_, PyList>) -> Vec<*mut ffi::PyObject> {
    let mut changed = Vec::new();
    for object in objects {
        let count = object.as_ptr().cast::<u32>();
        // SAFETY: each object begins with its reference count, and the interpreter is locked, so nobody else writes to it.
        // In a release build of these versions, the low half says whether it is counted. Counts that are already immortal
        // have the highest bit set.
        unsafe {
            if *count <= i32::MAX as u32 {
                *count = IMMORTAL;
                changed.push(object.as_ptr());
            }
        }
    }
    changed
}
