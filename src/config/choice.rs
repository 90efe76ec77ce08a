//! The named choices of the configuration, each with its one YAML spelling.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Declares an enum, its serde names and the list of names from one table.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant),+
        }

        impl $name {
            /// Every accepted spelling, in the order of declaration.
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The YAML spelling.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }

            /// The choice spelt `name`, if there is one.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

choice! {
    /// Which network is trained; each has a recipe of defaults of the same name.
    ModelName {
        /// The convolutional CIFAR-10 network.
        Cifar10 = "cifar10",
        /// The residual networks for CIFAR pictures.
        Resnet = "resnet",
        /// A straight line fitted to noisy points.
        Line = "line",
    }
}

choice! {
    /// Where examples come from.
    DataName {
        /// The CIFAR-10 binary files.
        Cifar10 = "cifar10",
        /// The CIFAR-100 binary files.
        Cifar100 = "cifar100",
        /// Generated images.
        Synthetic = "synthetic",
        /// Generated noisy points on a line.
        Line = "line",
    }
}

impl DataName {
    /// Whether its examples are in files.
    pub fn reads_files(self) -> bool {
        match self {
            Self::Cifar10 | Self::Cifar100 => true,
            Self::Synthetic | Self::Line => false,
        }
    }
}

choice! {
    /// The update rule.
    OptimizerName {
        /// Plain gradient descent.
        Sgd = "sgd",
        /// Gradient descent with momentum.
        Momentum = "momentum",
    }
}

choice! {
    /// The shape of the learning-rate schedule.
    ScheduleName {
        /// The same rate throughout.
        Constant = "constant",
        /// Multiplied by a factor every so many epochs.
        Exponential = "exponential",
        /// Steps between given values.
        Piecewise = "piecewise",
        /// Polynomial descent to a final rate.
        Polynomial = "polynomial",
    }
}

choice! {
    /// Where the variables live.
    VariablePlacement {
        /// One copy in host memory, read by every tower.
        Cpu = "cpu",
        /// One copy on every tower.
        Replicated = "replicated",
    }
}

choice! {
    /// What checkpoints are written as.
    CheckpointFormat {
        /// One safetensors file each.
        Safetensors = "safetensors",
        /// TensorFlow's own files, an index and data.
        TensorFlow = "tensorflow",
    }
}

choice! {
    /// How the towers' gradients are averaged.
    Reduce {
        /// The best the machine offers.
        Auto = "auto",
        /// NCCL between GPUs.
        Nccl = "nccl",
        /// In host memory.
        Cpu = "cpu",
        /// Not at all: each replica goes its own way.
        None = "none",
    }
}

choice! {
    /// How the tasks of a cluster train together.
    ClusterMode {
        /// Parameter servers; every update is the mean over all workers.
        PsSync = "ps-sync",
        /// Parameter servers; every worker's gradient is an update of its own.
        PsAsync = "ps-async",
        /// Equal workers that exchange gradients, no parameter servers.
        Collective = "collective",
        /// One client that owns the variables and feeds towers on tasks that only serve.
        InGraph = "in-graph",
        /// Nobody trains by itself: tasks of any jobs answer TensorFlow's clients.
        Session = "session",
    }
}

choice! {
    /// Which parameter server holds what.
    Placement {
        /// All the same number of bytes; variables are split.
        Even = "even",
        /// Variable after variable, server after server.
        RoundRobin = "round-robin",
        /// Each variable to the server with the fewest bytes.
        Greedy = "greedy",
    }
}

choice! {
    /// Whether GPUs keep the pictures that they learn from, and distort them.
    OnDevice {
        /// Where the pictures take less than a quarter of each GPU's free memory.
        Auto = "auto",
        /// It is an error where they do not fit.
        Always = "always",
        /// The CPU distorts.
        Never = "never",
    }
}

choice! {
    /// Who carries gradients between the workers of a collective.
    Engine {
        /// NCCL where every worker's towers are GPUs of their own and all have NCCL, else this program.
        Auto = "auto",
        /// This program, over gRPC.
        Grpc = "grpc",
        /// NCCL, from GPU to GPU.
        Nccl = "nccl",
    }
}

choice! {
    /// Which way gradients take between workers.
    Exchange {
        /// Everybody sends everybody its share.
        Direct = "direct",
        /// Around a ring.
        Ring = "ring",
    }
}

choice! {
    /// How the floats of gradients travel between workers.
    Wire {
        /// As they are.
        F32 = "f32",
        /// Rounded to bfloat16: half the bytes, 8 bits of precision, the range of f32.
        Bf16 = "bf16",
        /// Rounded to IEEE half precision: half the bytes, 11 bits of precision, infinite from 65,520.
        F16 = "f16",
    }
}

choice! {
    /// How convolutions are computed.
    Convolution {
        /// The faster way for each one's shape.
        Auto = "auto",
        /// As sums of products, all of them.
        Direct = "direct",
        /// By Winograd's minimal filtering where there is one: stride 1, filters of 3x3 or 5x5.
        Winograd = "winograd",
    }
}

choice! {
    /// The number format in which products and convolutions take their operands; sums, variables and gradients are f32.
    Precision {
        /// IEEE single precision.
        F32 = "f32",
        /// As f32, but factors are rounded to 11 bits of precision on their way into a GPU's tensor cores.
        Tf32 = "tf32",
        /// Operands rounded to bfloat16: by AMX or AVX-512 where the processor has it, else by f32.
        Bf16 = "bf16",
    }
}
