//! `tftrain data fetch` and `tftrain data info`.

use std::path::PathBuf;

use anyhow::Result;

use super::args::{DataArgs, DataWhat};
use super::exit::Usage;
use super::output::print;
use super::setup::fetch_set;
use crate::data::{ArchiveInfo, CifarSet};
use crate::util::stats;

/// The CIFAR set of a name.
pub(super) fn cifar_set(name: &str) -> Result<CifarSet> {
    match name {
        "cifar10" => Ok(CifarSet::Ten),
        "cifar100" => Ok(CifarSet::Hundred),
        _ => {
            Err(Usage(format!("there is no archive of {name:?}; known: cifar10, cifar100")).into())
        }
    }
}

/// Fetches or describes.
pub(super) fn data(args: &DataArgs) -> Result<u8> {
    match &args.what {
        DataWhat::Fetch { name, data_dir, url } => {
            let set = cifar_set(name)?;
            let dir = data_dir.clone().unwrap_or_else(|| PathBuf::from("data").join(name));
            let folder = fetch_set(set, &dir, url.as_deref())?;
            print(&format!("{}\n", folder.display()))
        }
        DataWhat::Info { name } if name == "synthetic" => print(
            "synthetic: 50,000 training and 10,000 held-out pictures of 32x32 in ten classes, drawn by formula from the\n\
             seed; no file is needed.\n",
        ),
        DataWhat::Info { name } if name == "line" => print(
            "line: examples of y = 5x + 8 + 0.22 noise, drawn from the seed; no file is needed.\n",
        ),
        DataWhat::Info { name } => {
            let info = ArchiveInfo::of(cifar_set(name)?);
            let mut text = format!(
                "{name}: {} ({}), digest {}\nunpacks to:\n",
                info.url,
                stats::bytes(info.size),
                info.digest.expected()
            );
            for member in info.members {
                text += &format!("  {member}\n");
            }
            print(&text)
        }
    }
}
