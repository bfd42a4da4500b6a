//! Huge pages of the system, which are not for a supervisor.

use rustix::mm::{Advice, madvise};

/// Below this a mapping has no huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Has the memory of this process come in small pages. Its allocator asks for huge ones, which make a broker with millions
/// of jobs quicker; a supervisor has some hundred kilobytes in use, spread over what would be nine huge pages: 19 MB with
/// 400 slots.
pub fn avoid() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return;
    };
    for (start, end) in maps.lines().filter_map(anonymous) {
        if end - start >= HUGE_PAGE_BYTES {
            // SAFETY: it changes no bytes. A mapping that is gone by now is refused, and so is all of it by a system
            // without huge pages.
            let _ = unsafe {
                madvise(
                    std::ptr::with_exposed_provenance_mut(start),
                    end - start,
                    Advice::LinuxNoHugepage,
                )
            };
        }
    }
}

/// Where a mapping is, if it is private memory of this process: `7f1c00000000-7f1c40000000 rw-p 00000000 00:00 0`.
fn anonymous(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_ours = fields.next()? == "rw-p" && fields.nth(2)? == "0" && fields.next().is_none();
    let number = |digits| usize::from_str_radix(digits, 16).ok();
    is_ours.then_some((number(start)?, number(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_without_a_name_is_meant() {
        let check = |line: &str, expected| assert_eq!(anonymous(line), expected, "{line}");
        check(
            "7f1c00000000-7f1c40000000 rw-p 00000000 00:00 0 ",
            Some((0x7f1c_0000_0000, 0x7f1c_4000_0000)),
        );
        check("55d0c0000-55d0d0000 rw-p 00000000 00:00 0 [heap]", None);
        check(
            "7f1c000-7f1d000 r-xp 00001000 fe:00 1234 /lib/libc.so",
            None,
        );
        check("7f1c000-7f1d000 rw-s 00000000 00:01 77 /memfd:x", None);
        check("", None);
    }
}
