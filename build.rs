//! Compiles the protocol with a protobuf compiler written in Rust, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=src/rpc/tftrain.proto");
    let descriptors = protox::compile(["src/rpc/tftrain.proto"], ["src/rpc"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
