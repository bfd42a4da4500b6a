//! Feeds random bytes to each target: a quick check, where fuzzing searches for long.

use penstock_hostile::TARGETS;

#[test]
fn noise_breaks_nothing() {
    // xorshift64*, so that the same bytes come each time.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    for round in 0..200 {
        let length = random() as usize % 2_000;
        let bytes: Vec<u8> = (0..length).map(|_| (random() >> 32) as u8).collect();
        for (name, target) in TARGETS {
            println!("round {round} of {name}");
            target(&bytes);
        }
    }
}
