//! Who of a pool may serve, given what the breakers say of each: the one place where replicas are
//! judged together. No state. To add a rule: a variant of [`Eligible`] and a test below.

use super::{Admission, BreakerOptions, Cause};

/// Which replicas of a pool may serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eligible {
    /// Those that are ready or due for a trial.
    Sound,
    /// These, and those ejected for their answers: too many look bad for it to be their fault.
    Doubtful,
    /// Those that are cooling off, for want of others.
    Cooling,
    /// All, for want of anybody better.
    Anyone,
}

impl Eligible {
    /// Whether a replica of this admission may serve.
    pub fn admits(self, admission: Admission) -> bool {
        match (self, admission) {
            (Self::Anyone, _) => true,
            (Self::Cooling, admission) => matches!(admission, Admission::CoolingOff { .. }),
            (_, Admission::Ready | Admission::Trial { .. }) => true,
            (Self::Doubtful, Admission::Ejected { cause, .. }) => cause != Cause::ConnectFailed,
            (Self::Sound | Self::Doubtful, _) => false,
        }
    }
}

/// Which of a pool may serve, from what the breaker says of each that the probes think well of.
///
/// When more than `ejected_share_max` of them look bad by their answers, ejection for answers is
/// ignored: a fleet does not fall ill together, but bad requests reach all of it. Failed connects
/// are no matter of opinion; such a replica is tried before its time only when nobody is left.
pub fn eligible(
    admissions: impl IntoIterator<Item = Admission>,
    options: &BreakerOptions,
) -> Eligible {
    let (mut all, mut sound, mut cooling, mut doubtful, mut unsure) = (0_u32, 0_u32, 0_u32, 0, 0);
    for admission in admissions {
        all += 1;
        match admission {
            Admission::Ready => sound += 1,
            Admission::CoolingOff { .. } => cooling += 1,
            Admission::Trial { cause } => {
                sound += 1;
                unsure += u32::from(cause != Cause::ConnectFailed);
            }
            Admission::Ejected { cause, .. } => {
                doubtful += u32::from(cause != Cause::ConnectFailed)
            }
        }
    }
    let looks_bad = f64::from(doubtful + unsure);
    if 0 < doubtful && options.ejected_share_max * f64::from(all) < looks_bad {
        Eligible::Doubtful
    } else if 0 < sound {
        Eligible::Sound
    } else if 0 < cooling {
        Eligible::Cooling
    } else {
        Eligible::Anyone
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::clock;

    fn ready() -> Admission {
        Admission::Ready
    }

    fn cooling(until: Instant) -> Admission {
        Admission::CoolingOff { until }
    }

    fn bad(until: Instant) -> Admission {
        Admission::Ejected { until, cause: Cause::ServerErrors }
    }

    fn away(until: Instant) -> Admission {
        Admission::Ejected { until, cause: Cause::ConnectFailed }
    }

    /// Which of them serve, by their place.
    fn serving(admissions: &[Admission]) -> Vec<usize> {
        let eligible = eligible(admissions.iter().copied(), &BreakerOptions::default());
        let numbered = admissions.iter().enumerate();
        numbered.filter(|(_, one)| eligible.admits(**one)).map(|(place, _)| place).collect()
    }

    #[test]
    fn ejected_and_cooling_ones_are_left_out_while_others_are_ready() {
        let now = clock::now();
        assert_eq!(serving(&[ready(), bad(now), cooling(now), away(now), ready()]), [0, 4]);
    }

    #[test]
    fn one_on_trial_serves_beside_the_ready() {
        assert_eq!(serving(&[ready(), Admission::Trial { cause: Cause::Reset }]), [0, 1]);
    }

    #[test]
    fn a_majority_that_looks_bad_by_its_answers_serves() {
        let now = clock::now();
        assert_eq!(serving(&[bad(now), bad(now), ready(), ready()]), [2, 3], "half is no majority");
        assert_eq!(serving(&[bad(now), bad(now), bad(now), ready()]), [0, 1, 2, 3]);
        assert_eq!(serving(&[bad(now)]), [0], "the only one serves");
        let trial = Admission::Trial { cause: Cause::ServerErrors };
        assert_eq!(serving(&[trial, trial, bad(now), ready()]), [0, 1, 2, 3]);
    }

    #[test]
    fn those_that_cannot_be_reached_stay_out_however_many_they_are() {
        let now = clock::now();
        assert_eq!(serving(&[away(now), away(now), away(now), ready()]), [3]);
    }

    #[test]
    fn cooling_ones_come_before_unreachable_ones_and_those_before_nobody() {
        let now = clock::now();
        assert_eq!(serving(&[away(now), cooling(now)]), [1]);
        assert_eq!(serving(&[away(now), away(now)]), [0, 1]);
        assert_eq!(serving(&[]), [0_usize; 0]);
    }
}
