"""The producers, and the brokers besides the usual one, with which what the log shows is tested."""

NATIVE, LIBRDKAFKA = "native", "librdkafka"
ON_3_9, WITH_VERSION_1 = "librdkafka on 3.9.1", "librdkafka with transaction.version 1"
CASES = (NATIVE, LIBRDKAFKA, ON_3_9, WITH_VERSION_1)
