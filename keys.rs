
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_takes_128_bytes_beside_its_body() {
        assert_eq!(Slab::<Stored>::slot_bytes(), 128);
    }
}
