//! A stable hash and what is made of dice. Nothing here has a seed or a state: every Weir of every
//! version gets the same numbers, which is what lets several of them agree on a session's home.

/// Start value and prime of FNV-1a, 64 bits.
const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

/// Hash of some bytes: FNV-1a (64 bits), then the finaliser of splitmix64. FNV alone leaves the
/// high bits of short keys nearly equal, and the high bits decide a rendezvous. Not for secrets.
/// It must never change: sessions would all move at the upgrade.
pub fn stable_hash(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME);
    mix(bytes.iter().fold(FNV_START, fold))
}

/// The finaliser of splitmix64: every bit of the result depends on every bit of the number.
pub fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Dice as a number in `0.0..1.0`, from their high 53 bits.
pub fn unit_interval(dice: u64) -> f64 {
    (dice >> 11) as f64 / (1_u64 << 53) as f64
}

/// Dice as an index below `count`, from their high bits; zero when there is none.
pub(in crate::routing) fn index_below(dice: u64, count: usize) -> usize {
    ((u128::from(dice) * count as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_never_changes() {
        // Written down, not computed: a change moves every session of every user.
        assert_eq!(stable_hash(b""), 0xf52a_15e9_a9b5_e89b);
        assert_eq!(stable_hash(b"session-1"), 0x8f9d_4a83_e238_4785);
    }

    #[test]
    fn dice_become_numbers_below_one_and_indexes_in_range() {
        assert_eq!(unit_interval(0), 0.0);
        assert!(unit_interval(u64::MAX) < 1.0);
        assert_eq!(index_below(u64::MAX, 3), 2);
        assert_eq!(index_below(0, 3), 0);
        assert_eq!(index_below(u64::MAX, 0), 0);
    }
}
