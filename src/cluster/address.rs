//! The syntax of `host:port`; names are resolved late, elsewhere.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The one way to write an address (host in lower case, shortest IPv6), or what is wrong with it.
pub(crate) fn canonical(text: &str) -> Result<String, &'static str> {
    if text.is_empty() {
        return Err("is empty");
    }
    let no_port = "has no port: write host:port";
    let (host, port) = text.rsplit_once(':').ok_or(no_port)?;
    if text.ends_with(']') {
        return Err(no_port);
    }
    let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let port = digits.then(|| port.parse::<u16>().ok()).flatten();
    let port = port.filter(|&port| port > 0).ok_or("its port is not a number from 1 to 65535")?;
    if let Some(inner) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        let ip: Ipv6Addr = inner.parse().map_err(|_| "is not IPv6 between the brackets")?;
        return Ok(format!("[{ip}]:{port}"));
    }
    if host.contains("//") {
        return Err("leave out the scheme: write host:port");
    }
    if host.contains(':') {
        return Err("write IPv6 in brackets: [::1]:2222");
    }
    check_host(host)?;
    Ok(format!("{}:{port}", host.to_ascii_lowercase()))
}

/// `host:port`, with the brackets that a bare IPv6 host needs.
pub(crate) fn join(host: &str, port: u32) -> String {
    let bare_ipv6 = host.contains(':') && !host.starts_with('[');
    if bare_ipv6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// RFC 1123 host names, with the underscore that container networks use.
fn check_host(host: &str) -> Result<(), &'static str> {
    let labels = host.strip_suffix('.').unwrap_or(host);
    let legal = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
    let good = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(legal)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if labels.len() > 253 || !labels.split('.').all(good) {
        return Err("its host is not a host name or IP address");
    }
    // What ends in a number is meant as IPv4.
    let last = labels.rsplit('.').next().unwrap_or(labels);
    if last.bytes().all(|b| b.is_ascii_digit()) && host.parse::<Ipv4Addr>().is_err() {
        return Err("its host is not an IPv4 address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_way_to_write_each() {
        for (text, want) in [
            ("PS0.Example.com:02222", "ps0.example.com:2222"),
            ("10.0.0.1:65535", "10.0.0.1:65535"),
            ("[0:0::1]:1", "[::1]:1"),
            ("my_service-1.:80", "my_service-1.:80"),
        ] {
            assert_eq!(canonical(text).as_deref(), Ok(want));
        }
        assert_eq!(join("::1", 5), "[::1]:5");
    }

    #[test]
    fn says_what_is_wrong() {
        let long = format!("{}:1", "a".repeat(64));
        for (text, why) in [
            ("", "is empty"),
            ("host", "has no port: write host:port"),
            ("[::1]", "has no port: write host:port"),
            ("host:", "its port is not a number from 1 to 65535"),
            ("host:0", "its port is not a number from 1 to 65535"),
            ("host:65536", "its port is not a number from 1 to 65535"),
            ("host:+1", "its port is not a number from 1 to 65535"),
            ("::1:2222", "write IPv6 in brackets: [::1]:2222"),
            ("[::g]:1", "is not IPv6 between the brackets"),
            ("grpc://h:1", "leave out the scheme: write host:port"),
            (":1", "its host is not a host name or IP address"),
            (" a:1", "its host is not a host name or IP address"),
            ("a..b:1", "its host is not a host name or IP address"),
            ("-a:1", "its host is not a host name or IP address"),
            (&long, "its host is not a host name or IP address"),
            ("256.0.0.1:1", "its host is not an IPv4 address"),
            ("1.2.3:1", "its host is not an IPv4 address"),
        ] {
            assert_eq!(canonical(text), Err(why), "{text}");
        }
    }
}
