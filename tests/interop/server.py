"""A task of TensorFlow's own: server.py CLUSTER JOB INDEX, for recording what it says and for measuring beside it."""

import json
import sys

import tensorflow.compat.v1 as tf

cluster = tf.train.ClusterSpec(json.loads(sys.argv[1]))
tf.train.Server(cluster, job_name=sys.argv[2], task_index=int(sys.argv[3])).join()
