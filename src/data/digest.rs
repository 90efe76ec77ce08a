//! [`Digest`]: the fingerprint that a file must have.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use md5::Md5;
use sha2::Sha256;

/// The fingerprint that a file must have, in hex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digest<'a> {
    /// SHA-256.
    Sha256(&'a str),
    /// MD5, where nothing better is published: it tells damage, not malice.
    Md5(&'a str),
}

impl Digest<'_> {
    /// The expected fingerprint.
    pub fn expected(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Md5(hex) => hex,
        }
    }

    /// The fingerprint that a file has, in lower-case hex.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of_file(&self, path: &Path) -> io::Result<String> {
        match self {
            Self::Sha256(_) => hash::<Sha256>(path),
            Self::Md5(_) => hash::<Md5>(path),
        }
    }
}

fn hash<D: sha2::Digest>(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = D::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_test_vectors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(
            Digest::Sha256("").of_file(&path).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(Digest::Md5("").of_file(&path).unwrap(), "900150983cd24fb0d6963f7d28e17f72");
    }
}
