/* Prints the real and the effective user id: copied and made set-user-id by the tests. */
#include <stdio.h>
#include <unistd.h>

int main(void) { return printf("%u %u\n", (unsigned)getuid(), (unsigned)geteuid()) < 0; }
