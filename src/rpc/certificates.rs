//! [`issue`]: an authority of the cluster's own, and a certificate for each task.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use super::RpcError;
use crate::cluster::TaskId;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How long certificates count.
const LIFE: Duration = DAY.saturating_mul(3650);

/// A certificate and its key, as PEM.
pub struct Certified {
    /// The certificate.
    pub cert: String,
    /// The private key: nobody else's business.
    pub key: String,
}

/// Makes an authority and, signed by it, one certificate for each task and its host (a name or an IP address), good for both
/// ends of a connection and ten years from `now`, the time since the Unix epoch. Keys come from the system's random numbers, as
/// no seed may tell them.
///
/// # Errors
/// [`RpcError::Credentials`] with the task whose host can be in no certificate.
pub fn issue(
    tasks: &[(TaskId, String)],
    now: Duration,
) -> Result<(Certified, Vec<Certified>), RpcError> {
    let failed = |whose: &str, error: rcgen::Error| {
        RpcError::Credentials(format!("cannot make the certificate of {whose}: {error}"))
    };
    let of_authority = |error| failed("the authority", error);
    let key = KeyPair::generate().map_err(of_authority)?;
    let mut params = params(&[], "tftrain", now).map_err(of_authority)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority = Certified {
        cert: params.self_signed(&key).map_err(of_authority)?.pem(),
        key: key.serialize_pem(),
    };
    let issuer = Issuer::new(params, key);
    let certify = |(task, host): &(TaskId, String)| {
        certify(task, host, now, &issuer).map_err(|e| failed(&format!("{task} at {host}"), e))
    };
    Ok((authority, tasks.iter().map(certify).collect::<Result<_, _>>()?))
}

fn certify(
    task: &TaskId,
    host: &str,
    now: Duration,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<Certified, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = params(&[host.trim_matches(['[', ']'])], &task.to_string(), now)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(Certified { cert: params.signed_by(&key, issuer)?.pem(), key: key.serialize_pem() })
}

fn params(hosts: &[&str], name: &str, now: Duration) -> Result<CertificateParams, rcgen::Error> {
    let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, name);
    // Clocks of hosts differ a little.
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(DAY);
    params.not_after = epoch + now + LIFE;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Security;

    #[test]
    fn certificates_belong_to_their_keys() {
        let now = 20_000 * DAY;
        let task = |index, host: &str| (TaskId::new("worker", index), host.to_owned());
        let tasks = [task(0, "a.example.com"), task(1, "10.0.0.1"), task(2, "[::1]")];
        let (authority, certified) = issue(&tasks, now).unwrap();
        let [a, b, _] = &certified[..] else { panic!("{} certificates", certified.len()) };
        assert!(Security::default().with_tls(&authority.cert, &a.cert, &a.key).is_ok());
        assert!(Security::default().with_tls(&authority.cert, &a.cert, &b.key).is_err());
        assert!(Security::default().with_tls("nothing", &a.cert, &a.key).is_err());
        let error = issue(&[task(3, "schlüssel")], now).err().unwrap();
        assert!(error.to_string().contains("worker:3"), "{error}");
    }
}
