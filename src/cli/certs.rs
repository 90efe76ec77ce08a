//! `tftrain certs`: certificates for the tasks of a cluster.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Error, Result};
use clap::Args;

use super::exit::Usage;
use super::output::print;
use crate::cluster::TaskId;
use crate::io::IoError;
use crate::rpc::{Certified, issue};
use crate::util::clock::{Clock, SystemClock};

/// Keys are their owner's alone; certificates are for everybody.
const KEY: u32 = 0o600;
const CERT: u32 = 0o644;

#[derive(Debug, Args)]
pub(crate) struct CertsArgs {
    /// Folder for the authority's and the tasks' certificates and keys
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// The tasks and the host at which others reach each: worker:0=host
    #[arg(long, value_name = "TASK=HOST", required = true, num_args = 1..)]
    pub(crate) task: Vec<String>,
}

/// Makes the certificates and writes them where there are none yet.
pub(super) fn certs(args: &CertsArgs) -> Result<u8> {
    let tasks: Vec<(TaskId, String)> =
        args.task.iter().map(|text| task(text)).collect::<Result<_>>()?;
    let mut names: Vec<&TaskId> = tasks.iter().map(|(task, _)| task).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Usage(format!("--task names {} twice", pair[0])).into());
    }
    let (authority, certified) = issue(&tasks, SystemClock::default().wall())?;
    let create = |source| IoError::Io { path: args.out.clone(), action: "create", source };
    fs::create_dir_all(&args.out).map_err(create)?;
    write(&args.out, "ca", &authority)?;
    for ((task, _), certified) in tasks.iter().zip(&certified) {
        write(&args.out, &format!("{}-{}", task.job, task.index), certified)?;
    }
    let dir = args.out.display();
    print(&format!(
        "{dir} holds ca.pem, and a certificate and a key of each of {} tasks. In the configuration of the cluster:\n  \
         tls: {{ca: \"{dir}/ca.pem\", cert: \"{dir}/{{job}}-{{index}}.pem\", key: \"{dir}/{{job}}-{{index}}.key\"}}\n\
         Each host needs ca.pem and the two files of its own tasks; keep ca.key away from all of them.\n",
        tasks.len()
    ))
}

/// `worker:0=host`.
fn task(text: &str) -> Result<(TaskId, String)> {
    let usage = || Usage(format!("--task {text}: expected JOB:INDEX=HOST, such as worker:0=host"));
    let (task, host) = text.split_once('=').ok_or_else(usage)?;
    match host.is_empty() {
        true => Err(usage().into()),
        false => Ok((task.parse()?, host.to_owned())),
    }
}

fn write(dir: &Path, name: &str, certified: &Certified) -> Result<()> {
    for (ending, text, mode) in [("key", &certified.key, KEY), ("pem", &certified.cert, CERT)] {
        let path = dir.join(format!("{name}.{ending}"));
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => {
                let text = format!("{} exists; choose another --out", path.display());
                Error::from(Usage(text))
            }
            _ => IoError::Io { path, action: "write", source }.into(),
        })?;
    }
    Ok(())
}
