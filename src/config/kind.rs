//! What values a key takes, and how that is said.

use std::ops::{Bound, RangeBounds};

use serde_json::Value;

use crate::cluster::ClusterSpec;

/// A range of real numbers.
pub(crate) type Reals = (Bound<f64>, Bound<f64>);

/// Above 0.
pub(crate) const POSITIVE: Reals = (Bound::Excluded(0.0), Bound::Unbounded);
/// 0 or more.
pub(crate) const NOT_NEGATIVE: Reals = (Bound::Included(0.0), Bound::Unbounded);

/// The type and range of a key's value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Text with something in it.
    Text,
    /// One of these names.
    Choice(&'static [&'static str]),
    /// `true` or `false`.
    Switch,
    /// A whole number in `min..=max`.
    Whole { min: u64, max: u64 },
    /// A finite number.
    Real(Reals),
    /// A list of finite numbers of at least `least` entries.
    List { each: Reals, least: usize, ascending: bool },
    /// A list of different whole numbers, at least one.
    Ordinals,
    /// Addresses by job.
    Jobs,
}

impl Kind {
    /// The value in its one canonical form, or `None` if it does not fit.
    pub(crate) fn check(&self, value: &Value) -> Option<Value> {
        match *self {
            Self::Text => value.as_str().filter(|text| !text.trim().is_empty())?,
            Self::Choice(names) => value.as_str().filter(|name| names.contains(name))?,
            Self::Switch => return value.as_bool().map(Value::from),
            Self::Whole { min, max } => {
                return value.as_u64().filter(|n| (min..=max).contains(n)).map(Value::from);
            }
            Self::Real(range) => return real(value, range).map(Value::from),
            Self::List { each, least, ascending } => {
                let numbers: Vec<f64> =
                    value.as_array()?.iter().map(|v| real(v, each)).collect::<Option<_>>()?;
                let ordered = !ascending || numbers.is_sorted_by(|a, b| a < b);
                return (ordered && numbers.len() >= least).then(|| numbers.into());
            }
            Self::Ordinals => {
                let ordinal = |v: &Value| v.as_u64().filter(|n| *n <= u64::from(u16::MAX));
                let numbers: Vec<u64> =
                    value.as_array()?.iter().map(ordinal).collect::<Option<_>>()?;
                return (!numbers.is_empty()).then(|| numbers.into());
            }
            Self::Jobs => {
                let spec: ClusterSpec = serde_json::from_value(value.clone()).ok()?;
                return serde_json::to_value(spec).ok();
            }
        };
        Some(value.clone())
    }

    /// "a whole number of at least 1": what `check` accepts.
    pub(crate) fn wanted(&self) -> String {
        match *self {
            Self::Text => "text that is not empty".into(),
            Self::Choice(names) => format!("one of {}", names.join(", ")),
            Self::Switch => "true or false".into(),
            Self::Whole { min, max: u64::MAX } => format!("a whole number of at least {min}"),
            Self::Whole { min, max } => format!("a whole number from {min} to {max}"),
            Self::Real(range) => format!("a number {}", range_text(range)),
            Self::List { each, ascending, .. } => {
                let order = if ascending { "ascending " } else { "" };
                format!("a list of {order}numbers, each {}", range_text(each))
            }
            Self::Ordinals => "a list of whole numbers".into(),
            Self::Jobs => "jobs with lists of addresses".into(),
        }
    }
}

fn real(value: &Value, range: Reals) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && range.contains(number))
}

fn range_text((low, high): Reals) -> String {
    let low = match low {
        Bound::Included(low) => format!("of at least {low}"),
        Bound::Excluded(low) => format!("above {low}"),
        Bound::Unbounded => "of any size".into(),
    };
    match high {
        Bound::Included(high) => format!("{low} and at most {high}"),
        Bound::Excluded(high) => format!("{low} and below {high}"),
        Bound::Unbounded => low,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ranges_are_checked_at_their_edges() {
        let momentum = Kind::Real((Bound::Included(0.0), Bound::Excluded(1.0)));
        assert_eq!(momentum.check(&json!(0)), Some(json!(0.0)));
        assert_eq!(momentum.check(&json!(1)), None);
        assert_eq!(momentum.check(&json!(-1e-9)), None);
        assert_eq!(Kind::Real(POSITIVE).check(&json!(0.0)), None);
        let count = Kind::Whole { min: 1, max: 3 };
        assert_eq!(count.check(&json!(3)), Some(json!(3)));
        for bad in [json!(0), json!(4), json!(-1), json!(1.0), json!("1"), json!(null)] {
            assert_eq!(count.check(&bad), None, "{bad}");
        }
    }

    #[test]
    fn lists_must_ascend_and_have_enough_entries() {
        let list = Kind::List { each: POSITIVE, least: 1, ascending: true };
        assert_eq!(list.check(&json!([1, 2.5])), Some(json!([1.0, 2.5])));
        for bad in [json!([]), json!([2, 2]), json!([2, 1]), json!(["1"]), json!(1)] {
            assert_eq!(list.check(&bad), None, "{bad}");
        }
    }

    #[test]
    fn ordinals_are_whole_and_differ() {
        assert_eq!(Kind::Ordinals.check(&json!([2, 0])), Some(json!([2, 0])));
        assert_eq!(Kind::Ordinals.check(&json!([1, 1])), Some(json!([1, 1])));
        for bad in [json!([]), json!([-1]), json!([0.5]), json!([99_999]), json!(0)] {
            assert_eq!(Kind::Ordinals.check(&bad), None, "{bad}");
        }
    }

    #[test]
    fn wants_read_as_english() {
        let open = (Bound::Excluded(0.0), Bound::Excluded(1.0));
        assert_eq!(Kind::Real(open).wanted(), "a number above 0 and below 1");
        assert_eq!(
            Kind::List { each: POSITIVE, least: 0, ascending: true }.wanted(),
            "a list of ascending numbers, each above 0"
        );
        assert_eq!(Kind::Whole { min: 1, max: u64::MAX }.wanted(), "a whole number of at least 1");
    }
}
