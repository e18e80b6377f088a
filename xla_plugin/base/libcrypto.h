#ifndef XLA_PLUGIN_BASE_LIBCRYPTO_H_
#define XLA_PLUGIN_BASE_LIBCRYPTO_H_

#include <array>
#include <cstddef>
#include <span>

#include "xla_plugin/base/error.h"
#include "xla_plugin/base/library.h"

namespace jaxhet {
namespace evp {

// Types and values of OpenSSL's <openssl/evp.h>, declared here so that no OpenSSL is needed to
// build.
struct CipherContext;
struct Cipher;
struct Digest;
struct Engine;

inline constexpr int kGetTag = 0x10;  // EVP_CTRL_GCM_GET_TAG
inline constexpr int kSetTag = 0x11;  // EVP_CTRL_GCM_SET_TAG

}  // namespace evp

inline constexpr std::array kCryptoLibraries = {"libcrypto.so.3", "libcrypto.so.1.1"};

// The entry points of OpenSSL's libcrypto that we use, loaded at run time. Those that return int
// return 1 for success.
struct CryptoApi {
  Library library;

  Function<const char*(int)> version{library, "OpenSSL_version"};
  Function<evp::CipherContext*()> new_context{library, "EVP_CIPHER_CTX_new"};
  Function<void(evp::CipherContext*)> free_context{library, "EVP_CIPHER_CTX_free"};
  Function<const evp::Cipher*()> aes_256_gcm{library, "EVP_aes_256_gcm"};
  // Cipher, key and nonce may be null: they stay. Last: 1 encrypts, 0 decrypts, -1 stays.
  Function<int(evp::CipherContext*, const evp::Cipher*, evp::Engine*, const unsigned char*,
               const unsigned char*, int)>
      init{library, "EVP_CipherInit_ex"};
  Function<int(evp::CipherContext*, unsigned char*, int*, const unsigned char*, int)> update{
      library, "EVP_CipherUpdate"};
  Function<int(evp::CipherContext*, unsigned char*, int*)> finish{library, "EVP_CipherFinal_ex"};
  Function<int(evp::CipherContext*, int, int, void*)> control{library, "EVP_CIPHER_CTX_ctrl"};
  Function<const evp::Digest*()> sha256{library, "EVP_sha256"};
  Function<unsigned char*(const evp::Digest*, const void*, int, const unsigned char*, size_t,
                          unsigned char*, unsigned*)>
      hmac{library, "HMAC"};
};

// Throws UsageError, with the loader's words, if the library is not there or too old.
inline CryptoApi LoadCrypto(std::span<const char* const> names = kCryptoLibraries) {
  return CryptoApi{Library(names, ErrorCode::kUsage)};
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_LIBCRYPTO_H_
