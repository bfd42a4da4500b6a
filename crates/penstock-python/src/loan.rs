use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_worker::{LongWait, Resumed, Window};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::wait::SLICE;

/// Time after which a wait counts as long, so that the waiting job's slot is lent.
pub(crate) const SHORT: Duration = Duration::from_millis(1);

/// Wait of a running job for others, during which its slot may be lent. Used once.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Loan {
    window: Arc<Window>,
    job: [u8; 16],
    state: Mutex<LoanState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoanState {
    Short,
    Long(LongWait),
    /// The wait is over, and the job waits for its turn.
    WantsTurn(u32),
    Over,
}

impl Loan {
    pub(crate) fn new(window: Arc<Window>, job: [u8; 16]) -> Self {
        Self {
            window,
            job,
            state: Mutex::new(LoanState::Short),
        }
    }

    fn lock(&self) -> MutexGuard<'_, LoanState> {
        // No holder of the lock panics, and each change leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the slot, because the wait takes long. If the supervisor can't be notified, it is gone, and this
    /// process ends with it.
    pub(crate) fn begin_now(&self) {
        let mut state = self.lock();
        if *state == LoanState::Short
            && let Ok(Some(wait)) = self.window.begin_wait(self.job)
        {
            *state = LoanState::Long(wait);
        }
    }

    fn end(&self, is_on_loop: bool) -> PyResult<Option<u32>> {
        let mut state = self.lock();
        match *state {
            LoanState::Short | LoanState::Over => {
                *state = LoanState::Over;
                Ok(None)
            }
            LoanState::WantsTurn(number) => Ok(Some(number)),
            LoanState::Long(wait) => match self.window.end_wait(wait, is_on_loop)? {
                Resumed::Now => {
                    *state = LoanState::Over;
                    Ok(None)
                }
                Resumed::After(number) => {
                    *state = LoanState::WantsTurn(number);
                    Ok(Some(number))
                }
            },
        }
    }
}

#[pymethods]
impl Loan {
    /// Lend the slot: the wait takes long.
    fn begin(&self, py: Python<'_>) {
        py.detach(|| self.begin_now());
    }

    /// Take the slot back after the wait: return when the job may continue.
    fn take_back(&self, py: Python<'_>) -> PyResult<()> {
        let Some(number) = self.end(false)? else {
            return Ok(());
        };
        while !py.detach(|| self.window.await_turn(number, SLICE)) {
            if let Err(interrupted) = check_interrupts(py) {
                self.drop()?;
                return Err(interrupted);
            }
        }
        *self.lock() = LoanState::Over;
        Ok(())
    }

    /// Ask for the slot after the wait. True: the job continues once `has_turn` says so; check it after each
    /// signal.
    fn ask_back(&self) -> PyResult<bool> {
        Ok(self.end(true)?.is_some())
    }

    #[getter]
    fn has_turn(&self) -> bool {
        match *self.lock() {
            LoanState::WantsTurn(number) => self.window.has_turn(number),
            _ => true,
        }
    }

    /// Abandon the wait, so that the job continues at once.
    fn drop(&self) -> PyResult<()> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, LoanState::Over) {
            LoanState::Short | LoanState::Over => {}
            LoanState::Long(wait) => self.window.break_off(wait)?,
            LoanState::WantsTurn(number) => self.window.give_up_turn(number)?,
        }
        Ok(())
    }
}

static NOTHING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Lets interrupts through: signals in the main thread, and exceptions that another thread sent to this one.
/// The latter only arrive while Python code runs.
pub(crate) fn check_interrupts(py: Python<'_>) -> PyResult<()> {
    py.check_signals()?;
    let nothing = NOTHING.get_or_try_init(py, || {
        py.eval(c"lambda: None", None, None).map(Bound::unbind)
    })?;
    nothing.call0(py).map(drop)
}
