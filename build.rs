//! Compiles the protocols with a protobuf compiler written in Rust, so that no `protoc` is needed.

#[allow(
    clippy::disallowed_methods,
    reason = "cargo names the folder of what is made in the environment"
)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in ["rpc/tftrain.proto", "rpc/tensorflow.proto", "session/tensorflow.proto"] {
        println!("cargo:rerun-if-changed=src/{file}");
    }
    let own = protox::compile(["src/rpc/tftrain.proto"], ["src/rpc"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(own)?;

    // Messages without a network for `session`; the services around them for `rpc`.
    let messages = protox::compile(["src/session/tensorflow.proto"], ["src"])?;
    tonic_prost_build::configure().bytes(".").btree_map(".").compile_fds(messages)?;
    let services = protox::compile(["src/rpc/tensorflow.proto"], ["src"])?;
    let folder = std::path::Path::new(&std::env::var("OUT_DIR")?).join("services");
    std::fs::create_dir_all(&folder)?;
    tonic_prost_build::configure()
        .out_dir(folder)
        .extern_path(".tensorflow", "crate::session::proto")
        .compile_fds(services)?;
    Ok(())
}
